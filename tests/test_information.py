"""What is written for the user's information: a warning per cause, and the run goes on."""

import ast
import contextlib
import os
import resource
import warnings
from pathlib import Path

import pytest

from graphshard.errors import GraphshardWarning
from graphshard.files.information import informing, printable, write_whole

PACKAGE = Path(__file__).parents[1] / "graphshard"


@contextlib.contextmanager
def no_room(limit_bytes: int = 0):
    """A disk on which no file can be larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_whole_file_or_what_was_there(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write_whole(path, "first")
    with no_room(3), pytest.raises(OSError, match="File too large"):
        write_whole(path, "second")
    assert path.read_text() == "first"
    assert os.listdir(path.parent) == ["b.txt"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    found = os.umask(0o022)
    os.umask(found)
    return found


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path):
    write_whole(tmp_path / "x", "a\udc80b")
    assert (tmp_path / "x").read_text() == "a\\udc80b"


@pytest.mark.parametrize(
    "path",
    ["/proc/no/folder/x", "file/x", "n" * 300, "a\0b", "file" + "d" * 300 + "/x"],
)
def test_what_cannot_be_written_warns_once(tmp_path, path):
    (tmp_path / "file").write_text("")
    found = tmp_path / path
    with pytest.warns(GraphshardWarning, match=r"GS1201: a report is not written to .*: \w+"):
        _write(found, str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _write(found, str(tmp_path))
    assert os.listdir(tmp_path) == ["file"]


def _write(path, folder):
    with informing("a report", folder):
        write_whole(path, "text")


def test_a_full_disk_warns(tmp_path):
    with no_room(), pytest.warns(GraphshardWarning, match="GS1201: .*File too large"):
        _write(tmp_path / "x", tmp_path)


def test_an_interrupt_passes():
    with pytest.raises(KeyboardInterrupt), informing("a report", "somewhere"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0", "layers.0"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("\x9b2J", r"\x9b2J"),
        ("\u202eabc", r"\u202eabc"),
        ("\udc80", r"\udc80"),
        ("Schicht \u00e4 \u5c42", "Schicht \u00e4 \u5c42"),
        ("no\u00a0break", "no\u00a0break"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text, shown):
    assert printable(text) == shown


def test_a_line_break_may_stay():
    assert printable("a\n\x1b", keep="\n") == "a\n\\x1b"


# Where the user waits for the file itself: commands, and the doctor's own process.
WRITERS = ("files/information.py", "files/writing.py", "cli/", "doctor/")
WRITES = {"write_text", "write_bytes", "mkdir", "makedirs", "mkstemp", "NamedTemporaryFile"}


def test_a_run_writes_in_one_way_only():
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(WRITERS):
            calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
            names = {getattr(c.func, "attr", getattr(c.func, "id", "")) for c in calls}
            found += [f"{name}: {word}" for word in sorted(names & WRITES)]
    assert found == []
