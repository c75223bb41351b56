"""Runs the program of a page as one rank: `howto_run.py PAGE FOLDER`."""

import os
import sys
from pathlib import Path

from howto import SEPARATOR, page_of


def main(path: str, folder: str) -> None:
    os.chdir(folder)
    page = page_of(Path(path))
    names = {"__name__": "__main__"}
    for number, block in enumerate(page.program):
        if number:
            print(end=SEPARATOR, flush=True)
        # Lines of tracebacks are those of the page.
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, page.path, "exec"), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
