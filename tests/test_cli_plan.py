"""`graphshard plan`: its screens, its JSON, a message and an exit status for each error."""

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
from offline_models import EXAMPLES, HARDWARE

from graphshard.cli import main
from graphshard.offline.world import pretended
from graphshard.schedule.plan import Plan
from graphshard.schedule.reasons import Gain
from graphshard.view.offline import SweepRow, pareto

# Functions as a user writes them, right and wrong.
TARGETS = """
import sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from offline_models import Block, Net, net, shard, tokens

def good(batch=2, seq=4):
    return net(2, batch=batch, seq=seq)

def by_rule():
    return Net(nn.ModuleList([Block(), Block()])), {{"tokens": tokens()}}, shard

def with_data():
    model = nn.Linear(4, 4, device="cpu")
    fully_shard(model)
    return model, torch.zeros(2, 4)

def unsharded():
    return nn.Linear(4, 4), torch.zeros(2, 4)

def other_groups():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0 if dist.get_world_size() == 8 else 1])
    fully_shard(model)
    return model, torch.zeros(2, 4)

def other_rank(batch):
    model = nn.Linear(4, 4)
    fully_shard(model)
    return model, torch.zeros(*[2] * batch, 4)

def nothing():
    return "a model"

def with_keywords():
    return nn.Linear(4, 4), (), dict(input=torch.zeros(2, 4))

class Breaks(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x.sum()

def breaks():
    model = Breaks(4, 4)
    fully_shard(model)
    return model, torch.zeros(2, 4)

no_function = 3
"""


# What the screen of one plan compares, in this order.
ROWS = [
    "step time",
    "exposed communication",
    "peak memory",
    "received per rank",
    "no schedule is below",
    "why",
    "wrote good.plan.json",
]


@pytest.fixture
def cli(tmp_path, capsys, monkeypatch):
    """`cli("good", "--json")` plans TARGETS:good: exit status, stdout, errors on stderr."""
    file = tmp_path / "targets_of_test.py"
    file.write_text(TARGETS.format(tests=str(Path(__file__).parent)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(target, *more, world="8", hw=HARDWARE):
        where = target if ":" in target or "." in target else f"{file}:{target}"
        status = main(["plan", where, "--world", world, "--hw", hw, *more])
        out, err = capsys.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("graphshard: error: ")]
        return status, out, errors

    yield run
    sys.modules.pop(file.stem, None)


def test_the_screen_and_the_file(cli, tmp_path):
    status, out, errors = cli("good")
    assert (status, errors) == (0, [])
    lines = out.splitlines()
    assert lines[0] == f"good  8 ranks, {HARDWARE}, compute by Inductor"
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("FSDP2's own peak") for line in lines)
    starts = [line.split("  ")[0].strip() for line in lines if line]
    assert starts[2:5] == ["capture", "passes", "plan"]
    rows = [s for s in starts[5:] if s in ROWS]
    assert rows == ROWS
    plan = Plan.from_json((tmp_path / "good.plan.json").read_text())
    assert plan.name == "good"
    gains = [reason for reason in plan.reasons if isinstance(reason, Gain)]
    made = plan.estimate
    assert sum(g.gain_us for g in gains) == pytest.approx(
        made.fsdp2.step_time_us - made.step_time_us, abs=1e-6
    )
    assert sum(g.gain_bytes for g in gains) == made.fsdp2.peak_bytes - made.peak_bytes


def test_json_of_one_plan(cli, tmp_path):
    status, out, _ = cli("by_rule", "--json", "-o", "x.json")
    told = json.loads(out)
    plan = Plan.from_json((tmp_path / "x.json").read_text())
    assert status == 0
    assert told["path"] == "x.json"
    assert told["effort"]["num_groups"] == 3
    summary = json.loads(json.dumps(asdict(plan.summary())))
    assert {key: told[key] for key in summary} == summary


def test_a_sweep_is_a_table_with_its_best_rows_marked(cli, tmp_path):
    lists = ("--batch", "1,2", "--seq", "4", "--budget", "1KiB,1GiB", "-o", "plans")
    status, out, _ = cli("good", *lists, "--json", world="8,16")
    rows = [
        SweepRow(**{**row, "sizes": tuple(map(tuple, row["sizes"]))})
        for row in json.loads(out)["rows"]
    ]
    assert status == 3, "a row that does not fit"
    assert [(r.world_size, r.budget_bytes, dict(r.sizes)["batch"]) for r in rows] == [
        (world, budget, batch) for world in (8, 16) for budget in (1024, 2**30) for batch in (1, 2)
    ]
    assert all(("GS601" in r.why_not) == (r.budget_bytes == 1024) for r in rows)
    assert sorted(p.name for p in tmp_path.glob("plans/*.json")) == [
        f"good-{number}.plan.json" for number in (3, 4, 7, 8)
    ]
    assert json.loads(out)["front"] == "plans/good.front.svg"
    picture = (tmp_path / "plans/good.front.svg").read_text()
    for world, batch in product((8, 16), (1, 2)):
        assert f"good, {world} x {HARDWARE}, batch {batch}, seq 4" in picture
    assert picture.count("as the model is") == 4
    _, out, _ = cli("good", *lists, world="8,16")
    assert "time against peak: plans/good.front.svg" in out
    table = [line for line in out.splitlines() if line.endswith(HARDWARE) or HARDWARE in line][:8]
    best = pareto(rows)
    assert 0 < len(best) < 4
    assert [line.endswith("*") for line in table] == [index in best for index in range(8)]
    assert sum("does not fit" in line for line in table) == 4


def test_what_is_on_the_front():
    def row(us, peak):
        return SweepRow(8, "x", None, (), step_time_us=us, peak_bytes=peak)

    rows = [row(2.0, 10), row(1.0, 20), row(2.0, 20), row(2.0, 10), SweepRow(8, "x", None, ())]
    assert pareto(rows) == {0, 1, 3}


@pytest.mark.parametrize(
    ("target", "more", "status", "message"),
    [
        ("with_data", [], 1, "GS902: parameter weight is on cpu"),
        ("unsharded", [], 1, "GS903: no module of Linear is sharded"),
        ("other_groups", [], 1, "GS904: 0 is no group on every number of ranks"),
        ("other_rank", ["--batch", "1,2"], 1, "GS905: the inputs have other numbers of dimensions"),
        (
            "nothing.py:good",
            [],
            1,
            "GS906: 'nothing.py:good' is neither FILE.py:FUNCTION (no Python file",
        ),
        ("good.py", [], 1, "GS906: 'good.py' is neither FILE.py:FUNCTION"),
        ("demo:", [], 1, "GS906: no model demo:; there are demo:llama3_8b, demo:llama3_70b, "),
        ("demo:llama4", [], 1, "GS906: no model demo:llama4; there are demo:llama3_8b, "),
        ("no_function", [], 1, "has no function 'no_function'; it has"),
        ("by_rule", ["--batch", "2"], 1, "GS907: by_rule() has no parameter 'batch'"),
        ("nothing", [], 1, "GS908: nothing has to return (model, inputs), and returned str"),
        (
            "with_keywords",
            [],
            1,
            "GS908: with_keywords returned (model, inputs, shard) with a dict for shard",
        ),
        ("breaks", [], 1, "GS910: the step cannot be captured as one graph"),
        ("good", ["--budget", "1KiB"], 3, "GS601: no schedule fits a memory budget of 1.0 KiB"),
        ("good", ["-o", "none/x.json"], 2, "cannot write none/x.json"),
    ],
)
def test_errors_are_one_line_and_an_exit_status(cli, target, more, status, message):
    world = "8,16" if target == "other_groups" else "8"
    found, out, errors = cli(target, *more, world=world)
    assert (found, out) == (status, "")
    assert len(errors) == 1
    assert message in errors[0]


def test_an_unknown_machine(cli):
    status, _, (error,) = cli("good", hw="h1000")
    assert status == 2
    assert "GS501: " in error


def test_the_optimizer_is_part_of_the_step(cli, tmp_path):
    def planned(*more):
        assert cli("good", "--json", *more)[0] == 0
        return Plan.from_json((tmp_path / "good.plan.json").read_text()).estimate

    usual, clipped = planned(), planned("--clip")
    fused = planned("--optimizer", "adamw_fused", "--no-clip")
    assert usual.optimizer_us > fused.optimizer_us > 0
    assert clipped.optimizer_us > usual.optimizer_us
    assert (clipped.optimizer.clips, fused.optimizer.kind) == (True, "adamw_fused")
    assert usual.step_time_us == clipped.step_time_us == fused.step_time_us
    _, out, _ = cli("good", "--clip")
    (row,) = [line for line in out.splitlines() if line.startswith("  of it optimizer")]
    share = clipped.optimizer_us / clipped.whole_step_us
    assert row.endswith(f"{share:.1%}: adamw, clipped".replace("%", " %"))


def test_a_sweep_counts_the_optimizer_once_for_all_micro_steps(cli):
    rows = {}
    for count in ("1", "4"):
        more = ("--batch", "1,2", "--seq", "4", "--micro-steps", count, "--json")
        _, out, _ = cli("good", *more)
        rows[count] = json.loads(out)["rows"][0]
        whole_us = rows[count]["step_time_us"] + rows[count]["optimizer_us"]
        assert rows[count]["tokens_per_s"] == pytest.approx(int(count) * 4 / whole_us * 1e6)
    assert rows["1"]["optimizer_us"] == rows["4"]["optimizer_us"] > 0


def test_stragglers_of_as_many_ranks_as_there_are(cli):
    lists = ("--batch", "1,2", "--seq", "4")
    _, out, _ = cli("good", *lists, "--json", world="8,512")
    late = [row["stragglers_us"] for row in json.loads(out)["rows"]]
    assert 0 < late[0] < late[2]
    _, out, _ = cli("good", *lists, world="8,512")
    (heads,) = [line.split() for line in out.splitlines() if line.strip().startswith("world")]
    assert heads[5:9] == ["step", "optimizer", "stragglers", "exposed"]


def test_a_network_by_its_rate(cli, tmp_path):
    networks = "ib400,200Gbit,12.5GB/s,12.5GB/s:pod=1:oversubscribed=2"
    status, out, _ = cli("good", "--network", networks, "--json", world="16", hw="h100")
    assert status == 0
    rows = json.loads(out)["rows"]
    assert [row["hardware"] for row in rows] == [
        "h100-ib400",
        "h100-200gbit",
        "h100-100gbit",
        "h100-100gbit:pod=1:oversubscribed=2",
    ]
    times = [row["fsdp2_step_time_us"] for row in rows]
    assert times == sorted(times)
    assert len(set(times)) == 4
    for network, hw in (("200Gbit", "h100-ib400"), ("200", "h100")):
        status, _, (error,) = cli("good", "--network", network, hw=hw)
        assert status == 2
        assert "GS501: " in error


def test_ranks_of_a_node_are_the_machines(cli, tmp_path):
    status, out, _ = cli("good", world="144", hw="gb200")
    assert status == 0
    assert "144 ranks (2 x 72), gb200" in out
    assert Plan.from_json((tmp_path / "good.plan.json").read_text()).priced_on.ranks_per_node == 72
    _, out, _ = cli("good", "--per-node", "4", world="144", hw="gb200")
    assert "144 ranks (36 x 4), gb200" in out


def test_inside_a_process_group_the_command_fails_too(cli):
    with pretended(2):
        status, _, (error,) = cli("good")
    assert status == 1
    assert "GS901: " in error


@pytest.mark.parametrize("more", [["--batch", "0"], ["--seq", "4,,8"], ["--budget", "much"]])
def test_wrong_usage(cli, more):
    with pytest.raises(SystemExit, match="2"):
        cli("good", *more)


def test_a_file_that_is_no_python(cli, tmp_path):
    (tmp_path / "notes.txt").write_text("no Python")
    status, _, (error,) = cli(f"{tmp_path / 'notes.txt'}:good")
    assert status == 1
    assert "GS906: " in error


LARGE = """
import resource, sys, torch
from graphshard.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(sys.argv[1:]) == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_nothing_is_allocated_in_proportion_to_the_model(tmp_path):
    """70.55 billion parameters, 282 GB in float32."""
    target = f"{EXAMPLES / 'llama.py'}:llama3_70b"
    more = ["--world", "512", "--hw", HARDWARE, "-o", str(tmp_path / "x.json")]
    command = [sys.executable, "-c", LARGE, "plan", target, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "70.55 B parameters" in done.stdout
    assert "(74 blocks alike)" in done.stdout
    assert int(done.stdout.splitlines()[-1]) < 2**30


def test_the_title_says_which_compute_is_priced(cli, tmp_path):
    one = cli("good", "--compute", "aten", "-o", "one.json")[1].splitlines()[0]
    assert one == f"good  8 ranks, {HARDWARE}, compute op by op (aten)"
    assert Plan.load(tmp_path / "one.json").priced_on.fused is False
    many = cli("good", "--budget", "fsdp2,1GiB")[1].splitlines()[0]
    assert many == "good  compute by Inductor"
