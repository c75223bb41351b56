"""`graphshard tune`: its screen, its JSON, what it writes, and a message for each error."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graphshard.cli import main
from graphshard.schedule.setting import (
    Checkpointing,
    Decision,
    Grouping,
    MeshShape,
    NoTensor,
    Obstacle,
    Resharding,
    Scheduling,
    Setting,
    TensorObstacle,
)
from graphshard.view.front import front_svg
from graphshard.view.tune import (
    CHECKPOINTS,
    DECISIONS,
    GROUPS,
    KEPT,
    NO_TENSOR,
    RESHARDS,
    SCHEDULES,
    GainRow,
    Tuned,
    TuneRow,
    mesh_text,
    panels_of,
    tune_text,
)

TARGETS = """
import sys
sys.path.insert(0, {tests!r})
from offline_models import tokens
from tune_models import by_block, net

def good(batch=2, seq=32):
    model = net()
    by_block(model)
    return model, (tokens(batch, seq),)

def unsharded(batch, seq=32):
    return net(), (tokens(batch, seq),)

def uneven(batch=2, seq=32):
    model = net(dim=63)
    model.tp_plan = {{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
    return model, (tokens(batch, seq),)

def without_batch(seq=32):
    return net(), (tokens(2, seq),)

def without_default(batch, seq):
    return net(), (tokens(batch, seq),)
"""


@pytest.fixture
def cli(tmp_path, capsys, monkeypatch):
    """`cli("good", "--json")` tunes TARGETS:good: exit status, stdout, errors on stderr."""
    file = tmp_path / "targets_of_test.py"
    file.write_text(TARGETS.format(tests=str(Path(__file__).parent)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(target, *more, gpus="8", hw="h100-ethernet100"):
        capsys.readouterr()
        status = main(["tune", f"{file}:{target}", "--gpus", gpus, "--hw", hw, "--per-node", "4",
                       "--batch", "1,2", "--compute", "aten", *more])  # fmt: skip
        out, err = capsys.readouterr()
        return status, out, "\n".join(line for line in err.splitlines() if "error:" in line)

    return run


def test_the_screen_the_code_and_the_picture(cli, tmp_path):
    status, out, err = cli("good", "-o", "found", "--price", "2.5", "--batch-tokens", "1K")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "good  h100-ethernet100, no weights, no GPU used"
    assert lines[2].split()[:2] == ["GPUs", "mesh"]
    assert lines[2].endswith("$/M tokens")
    assert lines[3].endswith("now")
    assert lines[4].endswith("best")
    assert any(line.startswith("8 GPUs: ") for line in lines)
    assert any(line.startswith("  now -> best") for line in lines)
    assert lines[-2:] == ["wrote found/good_8.py", "wrote found/good.front.svg"]
    assert "def shard(model" in (tmp_path / "found/good_8.py").read_text()
    assert (tmp_path / "found/good.front.svg").read_text().startswith("<svg")


def test_json_has_the_same(cli):
    status, out, _ = cli("unsharded", "--json")
    (found,) = json.loads(out)["gpus"]
    assert status == 0
    assert found["now"] is None
    best = found["front"][0]
    assert best["setting"]["mesh"].keys() == {"replicas", "shards", "tensor"}
    sizes = dict(best["setting"]["sizes"])
    tokens = sizes["batch"] * sizes["seq"] * best["setting"]["micro_steps"] * 8
    assert best["tokens_per_s"] == pytest.approx(tokens / best["step_us"] * 1e6)
    assert best["usd_per_million"] is None


def test_nothing_fits(cli):
    status, out, _ = cli("good", "--max-memory", "4KiB")
    assert status == 3
    assert re.search(r"does not fit +> [\d.]+ [KM]iB", out)
    assert re.search(r"8 GPUs: none of [\d,]+ settings fits", out)


@pytest.mark.parametrize(
    ("target", "more", "status", "message"),
    [
        ("without_batch", (), 1, "GS907: without_batch(seq) has no parameter 'batch', which tune"),
        ("without_default", (), 1, "GS912: without_default has no default for seq: give --seq"),
        ("good", ("--batch-tokens", "100"), 2, "GS105: --batch-tokens 100: no number of micro-st"),
        ("nobody", (), 1, "GS906: "),
    ],
)
def test_errors(cli, target, more, status, message):
    found, out, err = cli(target, *more)
    assert (found, out) == (status, "")
    assert message in err


@pytest.mark.parametrize("given", ["--batch-tokens=x", "--price=0", "--price=much", "--gpus=0"])
def test_wrong_usage(cli, given):
    with pytest.raises(SystemExit) as stopped:
        cli("good", given)
    assert stopped.value.code == 2


# -- the view ------------------------------------------------------------------------------------


NOW = Setting(
    64, MeshShape(1, 64), Grouping.AS_IS, Resharding.AS_IS, Checkpointing.AS_IS,
    (("batch", 2), ("seq", 8192)), scheduling=Scheduling.FSDP2,
)  # fmt: skip
BEST = Setting(
    64, MeshShape(4, 16), Grouping.PAIRS, Resharding.OPEN, Checkpointing.AUTO,
    (("batch", 4), ("seq", 8192)), 2,
)  # fmt: skip
TUNED = Tuned(
    64,
    TuneRow(NOW, 1000.0, 2e6, 5e5, 2**30),
    (TuneRow(BEST, 1500.0, 3e6, 1e5, 2**31), TuneRow(NOW, 900.0, 3e6, 1e5, 2**29)),
    (
        GainRow(Decision.MESH, TuneRow(NOW, 1200.0, 2e6, 5e5, 2**30)),
        GainRow(Decision.GROUPING, TuneRow(NOW, least_bytes=2**33)),
        GainRow(Decision.BATCH, TuneRow(NOW, 1500.0, 2e6, 5e5, 2**31)),
    ),
    640,
    12,
    0.004,
)


def test_every_value_has_words():
    for kind, words in (
        *((Grouping, GROUPS), (Resharding, RESHARDS), (Checkpointing, CHECKPOINTS)),
        *((Scheduling, SCHEDULES), (Decision, DECISIONS), (Obstacle, KEPT)),
        (TensorObstacle, NO_TENSOR),
    ):
        assert set(words) == set(kind)


def test_the_text_says_what_is_gained():
    text = tune_text("llama", "h100", [TUNED], 12.3)
    assert "HSDP 4 x 16  2 blocks each  planned   planned    4 x 8,192            2" in text
    assert "64 GPUs: 640 settings, 12 planned; another one is at most 0.4% faster" in text
    assert re.search(r"now -> best +\+50\.0% tokens/s  \+1\.0 GiB", text)
    assert re.search(r"mesh: HSDP 4 x 16, not FSDP 64 +\+25\.0% tokens/s  \+1\.0 GiB", text)
    assert "groups: 2 blocks each, not as they are" in text
    assert "that does not fit: 8.0 GiB" in text
    assert re.search(r"batch: 4 x 8,192 x 2, not 2 x 8,192 +\+0\.0% tokens/s$", text, re.MULTILINE)


def test_why_calls_are_kept():
    text = tune_text("llama", "h100", [TUNED], 12.3, kept=Obstacle.ROOTS)
    assert "Its fully_shard calls stay as they are: several sharded modules are outermost." in text


def test_tensor_parallel_has_its_words():
    shapes = (MeshShape(1, 8, 8), MeshShape(2, 4, 8))
    best, other = (replace(BEST, mesh=shape) for shape in shapes)
    assert [mesh_text(one) for one in (best, other)] == ["FSDP 8 x TP 8", "HSDP 2 x 4 x TP 8"]
    gains = (GainRow(Decision.TENSOR, TuneRow(BEST, 1200.0, 2e6, 5e5, 2**30)),)
    front = (TuneRow(best, 1500.0, 3e6, 1e5, 2**31),)
    text = tune_text("llama", "h100", [replace(TUNED, front=front, gains=gains)], 12.3)
    assert re.search(r"tensor parallel: 8, not 1 +\+25\.0% tokens/s  \+1\.0 GiB", text)
    assert "is not searched" not in text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            NoTensor(TensorObstacle.UNEVEN, "blocks.0.up.weight", (4, 8)),
            "Tensor parallel over 4 and 8 ranks is not searched: blocks.0.up.weight does not",
        ),
        (
            NoTensor(TensorObstacle.STYLE, "wise"),
            "Tensor parallel is not searched: torch has no style 'wise'.",
        ),
    ],
    ids=lambda one: one.why if isinstance(one, NoTensor) else "",
)
def test_why_tensor_parallel_is_not_searched(found, text):
    assert text in tune_text("llama", "h100", [TUNED], 12.3, no_tensor=[found])


def test_the_command_says_what_is_left_out_and_takes_degrees(cli):
    status, out, _ = cli("uneven")
    (line,) = [line for line in out.splitlines() if line.startswith("Tensor parallel")]
    assert (status, "over 2 and 4 ranks" in line) == (0, True)
    status, out, _ = cli("uneven", "--tp", "1", "--json")
    assert json.loads(out)["no_tensor"] == []
    (found,) = json.loads(cli("uneven", "--tp", "2", "--json")[1])["no_tensor"]
    assert found == {"why": "uneven", "what": "blocks.0.up.weight", "degrees": [2]}


def test_the_picture_has_the_time_of_tokens_of_one_gpu():
    (panel,) = panels_of("llama", "h100", [TUNED])
    best, now = panel.series
    assert best.spots[0].step_us == pytest.approx(1000 * 64 / 1500 * 1e6)
    assert now.spots[0].peak_bytes == 2**30
    assert ">1,000 tokens of one GPU</text>" in front_svg([panel])
