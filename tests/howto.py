"""Pages whose code runs: what their blocks are, and what a reader gets who types them.

A page says how in a comment at its top: `<!-- run: 2 ranks -->`. Its blocks run in order, in one
folder that looks like a checkout:

- one that begins with the comment `# NAME.SUFFIX` (a script: below its first line) is that file,
  which a `shell` block names, or where `graphshard` looks for options;
- other `python` blocks are one program, which that many ranks run before any shell does;
- `shell` blocks are typed;
- a `text` block after "It prints:" is what was printed to stdout last, but for clocks;
  GRAPHSHARD_WRITE_FIGURES=1 writes it. After other words ("It prints, shortened:") it is a part of
  that, or of stderr: its lines at the left margin are there, with numbers that may differ.

A page has no other blocks.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warm import run_script

from bench.figures import Shell, without_clocks

ROOT = Path(__file__).parents[1]
RUNNER = Path(__file__).parent / "howto_run.py"
LIMIT_S = 200.0
SETTING = re.compile(r"<!-- run: (\d+) ranks?(?:, with ([\w, ]+))? -->")
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
NAME = re.compile(r"\A(?:#!.*\n)?# ([\w.-]+\.\w+)\n")
NUMBER = re.compile(r"[+-]?\d[\d,.]*( (s|ms|us|B|[KMGT]iB)\b)?")
WHOLE = "\nIt prints:\n\n"
# Between what two blocks print.
SEPARATOR = "\x1e\n"
# Beside those of `Shell`: torchrun with a rendezvous of its own, torchtitan's trainer, and Slurm
# with a job of two nodes that are both this machine.
TOOLS = {
    "torchrun": """case " $* " in
    *" -m torchtitan.train "*) exec "{python}" "{tests}/howto_torchtitan.py" "${@:5}" ;;
    *" --rdzv"*) ;;
    *) set -- --standalone "$@" ;;
esac
exec "{python}" -m torch.distributed.run "$@\"""",
    "sbatch": "export SLURM_JOB_ID=1 SLURM_NNODES=2 SLURM_JOB_NODELIST=here SLURM_GPUS_ON_NODE=1\n"
    'exec bash -e "$1"',
    "scontrol": "echo localhost; echo localhost",
    "srun": '"$@" & first=$!; "$@" & wait $first && wait $!',
}
# Of the tests: bits are compared with eager FSDP2's, and there is no other network.
OWN = {"GRAPHSHARD_COMPUTE": "aten", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Block:
    """line: of the page, where its text begins. whole: it is all that was printed."""

    kind: str
    text: str
    line: int
    whole: bool

    @property
    def file(self) -> str | None:
        found = NAME.match(self.text)
        return found[1] if found else None


@dataclass(frozen=True)
class Page:
    """ranks: of its program. needs: frameworks that it takes."""

    path: Path
    ranks: int
    needs: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def program(self) -> tuple[Block, ...]:
        """Its Python, but for files."""
        return tuple(b for b in self.blocks if b.kind == "python" and b.file is None)


def page_of(path: Path) -> Page:
    text = path.read_text()
    found = SETTING.search(text)
    assert found, f"{path.name}: how is it run? <!-- run: 2 ranks -->"
    blocks = [
        Block(
            match[1],
            match[2],
            text.count("\n", 0, match.start()) + 2,
            text[: match.start()].endswith(WHOLE),
        )
        for match in FENCE.finditer(text)
    ]
    assert text.count("```") == 2 * len(blocks)
    needs = tuple(found[2].split(", ")) if found[2] else ()
    return Page(path, int(found[1]), needs, tuple(blocks))


@dataclass(frozen=True)
class Printed:
    stdout: str = ""
    stderr: str = ""


def follow(page: Page, folder: Path, runner: str = "") -> str:
    """Does what the page says, in an empty folder; the page with the screens of today.

    runner: what scripts are run by there.
    """
    environment = _prepared(folder)
    for block in page.blocks:
        if block.file is not None:
            (folder / block.file).write_text(block.text)
    program = iter(_run_program(page, folder))
    printed, texts = Printed(), []
    for block in page.blocks:
        texts.append(block.text)
        where = f"{page.path.name}, line {block.line}"
        if block.file is not None:
            continue
        if block.kind == "python":
            printed = Printed(next(program))
        elif block.kind == "shell":
            command = re.sub(r"(torchrun .*?)(\w+\.py)", rf"\1{runner}\2", block.text)
            printed = _typed(command, folder, environment, where)
        else:
            assert block.kind == "text", f"{where}: nothing runs {block.kind!r}"
            texts[-1] = _shown(block, printed, where)
    following = iter(texts)
    return FENCE.sub(lambda match: f"```{match[1]}\n{next(following)}```", page.path.read_text())


def _shown(block: Block, printed: Printed, where: str) -> str:
    """The text of a block that shows what was printed."""
    if block.whole:
        return without_clocks(printed.stdout).rstrip() + "\n"
    lines, there = headings(block.text), headings(printed.stdout + printed.stderr)
    assert lines, f"{where}: nothing is compared"
    missing = [line for line in lines if line not in there]
    assert missing == [], f"{where}, printed was:\n{printed.stdout}{printed.stderr}"
    return block.text


def headings(screen: str) -> list[str]:
    """The beginnings of the lines at the left margin, without numbers."""
    lines = [line for line in screen.splitlines() if line[:1].strip()]
    return [NUMBER.sub("#", re.split(r"\s{2,}", line)[0]) for line in lines]


def _prepared(folder: Path) -> dict[str, str]:
    """The environment of what is typed in `folder`."""
    shell = Shell(folder)
    for name, script in TOOLS.items():
        filled = script.replace("{python}", sys.executable).replace("{tests}", str(RUNNER.parent))
        tool = folder / ".tools" / name
        tool.write_text(f"#!/bin/bash\n{filled}\n")
        tool.chmod(0o755)
    return shell.environment | OWN


def _run_program(page: Page, folder: Path) -> Sequence[str]:
    """What rank 0 prints in each of its blocks."""
    if not page.program:
        return ()
    own = {"GRAPHSHARD_CACHE_DIR": str(folder / ".cache")}
    words = [str(page.path), str(folder)]
    printed = run_script(RUNNER, page.ranks, LIMIT_S, *words, environment=own)
    return printed.split(SEPARATOR)


def _typed(command: str, folder: Path, environment: dict[str, str], where: str) -> Printed:
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=environment, text=True, timeout=LIMIT_S,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout}{done.stderr}"
    return Printed(done.stdout, done.stderr)
