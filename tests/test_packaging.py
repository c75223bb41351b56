"""What is published: a source distribution, the wheel that is made of it, a README for an index.

All are built once, as the release workflow does it. The wheel runs in an environment that has
nothing else of graphshard, from a folder that is no checkout.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from readme_renderer import markdown

import graphshard

ROOT = Path(__file__).parents[1]
ADDRESS, TAG = "https://host.example/owner/name", f"v{graphshard.__version__}"
MODEL = """
import torch
from torch.distributed.fsdp import fully_shard

def build():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model), torch.zeros(4, 64)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what there is, git says"),
]


@dataclass(frozen=True)
class Built:
    """sdist, wheel: the names of what they hold; in the first, without its folder."""

    wheel_path: Path
    sdist: frozenset[str]
    wheel: frozenset[str]
    metadata: Message


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"  # setuptools writes next to pyproject.toml
    for name in files("."):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    done(sys.executable, source / ".ci/for_index.py", ADDRESS, TAG)
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        held = [name.partition("/")[2] for name in archive.getnames()]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        parsed = message_from_string(archive.read(metadata).decode())
    return Built(wheel, frozenset(held), frozenset(names), parsed)


def done(*words: str | Path, **settings: object) -> str:
    """What a command that ends well prints."""
    found = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=240, check=False,
        **settings,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def files(folder: str, *suffixes: str) -> set[str]:
    """Of the checkout, links too, but for what git ignores."""
    listed = done("git", "ls-files", "-co", "--exclude-standard", folder, cwd=ROOT).splitlines()
    there = {name for name in listed if os.path.lexists(ROOT / name)}
    return {name for name in there if not suffixes or name.endswith(suffixes)}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    package = files("graphshard") - {"graphshard/passes"}
    passes = {f"graphshard/{name}" for name in files("passes", ".py")}
    found = {name for name in built.wheel if ".dist-info/" not in name}
    assert found == package | passes


def test_the_source_distribution_holds_tests_docs_and_examples(built):
    wanted = set().union(*(files(f, ".py", ".md", ".toml") for f in ("tests", "docs", "examples")))
    assert len(wanted) > 100
    assert wanted - built.sdist == set()
    assert {"Makefile", "constraints.txt", "CITATION.cff", ".ci/run"} <= built.sdist


def test_one_version(built):
    assert built.metadata["Version"] == graphshard.__version__


def test_a_tag_is_a_version_with_a_section_in_the_changelog(tmp_path):
    folder = tmp_path / "graphshard"
    folder.mkdir()
    (tmp_path / ".ci").mkdir()
    script = Path(shutil.copy(ROOT / ".ci/version.py", tmp_path / ".ci"))
    (folder / "_version.py").write_text('__version__ = "1.2.0"\n')
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [Unreleased]\n")
    done(sys.executable, script)
    with pytest.raises(AssertionError, match=r"has no section for 1\.2\.0"):
        done(sys.executable, script, "v1.2.0")
    changelog.write_text("# Changelog\n\n## [1.2.0] - 2026-12-01\n")
    done(sys.executable, script, "v1.2.0")
    with pytest.raises(AssertionError, match=r"the tag is v1\.3\.0, the version 1\.2\.0"):
        done(sys.executable, script, "v1.3.0")


def test_the_readme_renders_on_an_index(built):
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    text = built.metadata.get_payload()
    page = markdown.render(text)
    assert page is not None
    targets = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert len(targets) > 3
    relative = [to for to in targets if not to.startswith(("https://", "#"))]
    assert relative == []
    places = [to.removeprefix(f"{ADDRESS}/") for to in targets if to.startswith(ADDRESS)]
    assert places
    kinds = {to.split("/", 2)[:2][0] for to in places}
    assert kinds <= {"blob", "raw"}
    lost = [to for to in places if not (ROOT / to.split("/", 2)[2].partition("#")[0]).exists()]
    assert lost == []


def test_the_project_has_addresses(built):
    urls = dict(text.split(", ") for text in built.metadata.get_all("Project-URL"))
    assert urls["Homepage"] == ADDRESS
    assert urls["Changelog"] == f"{ADDRESS}/blob/{TAG}/CHANGELOG.md"
    for url in urls.values():
        place = url.removeprefix(f"{ADDRESS}/blob/{TAG}/")
        assert place == url or (ROOT / place).exists()


def test_the_wheel_runs_in_an_environment_of_its_own(built, tmp_path):
    """torch and the others are those of this environment; this graphshard is not."""
    done(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    paths = sysconfig.get_paths(vars=dict.fromkeys(("base", "platbase"), str(tmp_path / "venv")))
    Path(paths["purelib"], "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
         "--quiet", built.wheel_path)  # fmt: skip
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRAPHSHARD"))}
    place = {"cwd": tmp_path, "env": {**own, "GRAPHSHARD_CACHE_DIR": str(tmp_path / "cache")}}
    tool = tmp_path / "venv/bin/graphshard"
    (tmp_path / "model.py").write_text(MODEL)
    assert "plan" in done(tool, "--help", **place)
    assert done(tool, "--version", **place) == f"graphshard {graphshard.__version__}\n"
    where = "import graphshard, torch; print(graphshard.__file__, *torch._dynamo.list_backends())"
    file, *backends = done(python, "-c", where, **place).split()
    assert Path(file).is_relative_to(tmp_path)
    assert "graphshard" in backends
    done(tool, "plan", "model.py:build", "--world", "8", "--hw", "h100", **place)
    done(tool, "view", "build.plan.json", **place)
    assert (tmp_path / "build.html").stat().st_size > 0
