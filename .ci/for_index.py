"""Makes a checkout ready for a package index: `for_index.py https://HOST/OWNER/NAME TAG`.

Only who publishes knows where the repository is. Its address becomes the project's URLs in
pyproject.toml, and relative links and pictures of README.md become those of TAG there. The files
are changed in place.
"""

import re
import sys
from pathlib import Path

URLS = """[project.urls]
Homepage = "{address}"
Documentation = "{address}/blob/{tag}/docs/index.md"
Changelog = "{address}/blob/{tag}/CHANGELOG.md"
Issues = "{address}/issues"

"""
SCRIPTS = "[project.scripts]\n"
# `![text](picture)` and `[text](page#place)`, not `[text](https://...)` or `[text](#place)`.
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)(\))")


def main(address: str, tag: str) -> None:
    root = Path(__file__).parents[1]
    project, readme = root / "pyproject.toml", root / "README.md"
    project.write_text(with_urls(project.read_text(), address, tag))
    readme.write_text(absolute(readme.read_text(), address, tag))


def with_urls(project: str, address: str, tag: str) -> str:
    if project.count(SCRIPTS) != 1 or "[project.urls]" in project:
        raise SystemExit("pyproject.toml: there are URLs already, or no scripts")
    return project.replace(SCRIPTS, URLS.format(address=address, tag=tag) + SCRIPTS)


def absolute(readme: str, address: str, tag: str) -> str:
    """A picture inside a link, `[![text](picture)](page)`, is two links."""

    def replaced(found: re.Match[str]) -> str:
        picture, before, path, after = found.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}{before}{address}/{kind}/{tag}/{path}{after}"

    return LINK.sub(replaced, readme)


if __name__ == "__main__":
    main(*sys.argv[1:])
