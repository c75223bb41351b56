"""Is this checkout the version that a tag names? `version.py [vX.Y.Z]`; without a tag, any is."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(tag: str = "") -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "graphshard/_version.py").read_text())
    if version is None:
        raise SystemExit("graphshard/_version.py has no version")
    if tag and tag != f"v{version[1]}":
        raise SystemExit(f"the tag is {tag}, the version {version[1]} (graphshard/_version.py)")
    if tag and f"\n## [{version[1]}] - " not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(f"CHANGELOG.md has no section for {version[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
