"""`python -m graphshard`: what the command `graphshard` is."""

from graphshard.cli import main

raise SystemExit(main())
