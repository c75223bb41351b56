"""`python -m graphshard.cli`."""

from graphshard.cli import main

raise SystemExit(main())
