"""Options that a script does not give: from GRAPHSHARD_OPTIONS, and from a file of the project."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphshard.doctor.environment import probe_options
from graphshard.errors import OptionsError
from graphshard.files.configuration import CONFIG, OPTIONS, VARIABLES, Source
from graphshard.offline.world import pretended
from graphshard.options import Options, parse_options
from graphshard.report.explain import explain


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, two folders deep in an empty project; nothing in the environment."""
    for name in (OPTIONS, CONFIG, *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    inner = tmp_path / "project" / "scripts"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return inner


def origins(options):
    return {name: given.origin.source for name, given in options.given}


def test_pairs_are_read_as_python_or_json_writes_them(monkeypatch):
    text = " memory_budget=70GiB, replan_after=20,overlap_optimizer=True ,verify=every,machine=h100"
    monkeypatch.setenv(OPTIONS, text)
    assert parse_options(None) == Options(
        memory_budget=70 * 2**30, replan_after=20, overlap_optimizer=True, verify="every",
        machine="h100",
    )  # fmt: skip
    monkeypatch.setenv(OPTIONS, "memory_budget=None,overlap_optimizer=false,dump_dir=null")
    assert parse_options(None) == Options()
    monkeypatch.setenv(OPTIONS, "")
    assert parse_options(None) == Options()


def test_json_holds_what_pairs_cannot(monkeypatch):
    monkeypatch.setenv(OPTIONS, '{"dump_dir": "a,b=c", "triton.cudagraphs": true}')
    found = parse_options(None)
    assert found.dump_dir == Path("a,b=c")
    assert found.inductor == (("triton.cudagraphs", True),)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("aten", "GS106", "GRAPHSHARD_OPTIONS: 'aten' is no key=value; write key=value,key=value"),
        ("=aten", "GS106", "is no key=value"),
        ("compute=aten,\x1b[31m", "GS106", r"'\x1b[31m' is no key=value"),
        ("{", "GS106", "GRAPHSHARD_OPTIONS: not JSON"),
        ('{"compute": "aten"', "GS106", "GRAPHSHARD_OPTIONS: not JSON"),
        ("{" + "[" * 5000, "GS106", "GRAPHSHARD_OPTIONS: not JSON"),
        ("compute=" + "[" * 100_000, "GS103", "option compute="),
        ("comput=aten", "GS102", "unknown option 'comput'; did you mean 'compute'? (from GRAPH"),
        ("compute=fast", "GS103", "choose one of ('aten', 'inductor') (from GRAPHSHARD_OPTIONS)"),
        ("replan_after=soon", "GS103", "option replan_after='soon'; give a number from 2"),
        ("verify", "GS106", "'verify' is no key=value"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(monkeypatch, text, code, message):
    monkeypatch.setenv(OPTIONS, text)
    with pytest.raises(OptionsError) as caught:
        parse_options(None)
    assert caught.value.code == code
    assert message in str(caught.value)
    finding = probe_options().finding
    assert finding is not None
    assert finding.code == code


def test_the_nearest_file_counts_and_no_other(folder):
    project = folder.parent
    (project.parent / "graphshard.toml").write_text('reshard = "auto"\nverify = "every"\n')
    assert parse_options(None) == Options(reshard="auto", verify="every")
    (project / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    assert parse_options(None).reshard == "auto"  # nothing for graphshard in it
    (project / "pyproject.toml").write_text("[tool.graphshard]\nmicro_steps = 4\n")
    assert parse_options(None) == Options(micro_steps=4)
    (project / "graphshard.toml").write_text("micro_steps = 2\n")
    assert parse_options(None) == Options(micro_steps=2)
    (folder / "graphshard.toml").write_text("[triton]\ncudagraphs = false\n")
    assert parse_options(None) == Options(inductor=(("triton.cudagraphs", False),))


def test_a_named_file_counts_instead_of_the_nearest(folder, tmp_path, monkeypatch):
    (folder / "graphshard.toml").write_text("micro_steps = 2\n")
    for name, text in (("other.toml", ""), ("pyproject.toml", "[tool.graphshard]\n")):
        (tmp_path / name).write_text(f"{text}micro_steps = 8\n")
        monkeypatch.setenv(CONFIG, str(tmp_path / name))
        assert parse_options(None) == Options(micro_steps=8)


def test_paths_in_a_file_are_relative_to_it(folder):
    project = folder.parent
    (project / "graphshard.toml").write_text('dump_dir = "out"\nmachine = "costs.json"\n')
    found = parse_options(None)
    assert found.dump_dir == project / "out"
    assert found.machine == str(project / "costs.json")
    (project / "graphshard.toml").write_text('machine = "h100"\n')
    assert parse_options(None).machine == "h100"


def test_code_goes_over_the_environment_over_a_file(folder, monkeypatch):
    (folder / "graphshard.toml").write_text('verify = "off"\nreshard = "auto"\nmicro_steps = 3\n')
    monkeypatch.setenv(OPTIONS, "verify=every,micro_steps=5")
    found = parse_options({"micro_steps": 7})
    assert found == Options(reshard="auto", verify="every", micro_steps=7)
    assert origins(found) == {
        "reshard": Source.FILE, "verify": Source.ENVIRONMENT, "micro_steps": Source.CODE,
    }  # fmt: skip


def test_the_general_variable_goes_over_that_of_one_option(monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_COMPUTE", "aten")
    monkeypatch.setenv(OPTIONS, "compute=inductor")
    assert parse_options(None).compute == "inductor"


def test_aten_in_a_stronger_place_leaves_out_what_a_weaker_one_tells_inductor(folder, monkeypatch):
    (folder / "graphshard.toml").write_text("max_autotune = true\n")
    assert parse_options(None).inductor == (("max_autotune", True),)
    monkeypatch.setenv("GRAPHSHARD_COMPUTE", "aten")
    assert parse_options(None) == Options(compute="aten")
    with pytest.raises(OptionsError, match=r"GS104: .* leave out max_autotune"):
        parse_options({"max_autotune": False})
    monkeypatch.delenv("GRAPHSHARD_COMPUTE")
    (folder / "graphshard.toml").write_text('compute = "aten"\nmax_autotune = true\n')
    with pytest.raises(OptionsError, match=r"GS104: .* leave out max_autotune"):
        parse_options(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"verify = @", r"GS106: .*graphshard\.toml is no TOML: Invalid value \(at line 1"),
        (b"verify = '\xff'", r"GS106: .*graphshard\.toml is no TOML"),
        (b"verify = " + b"[" * 5000, r"GS106: .*graphshard\.toml is no TOML"),
        (b"#" * (2**20 + 1), r"GS106: options: .*graphshard\.toml: more than 1,048,576 bytes"),
        (b"verif = 'off'", r"GS102: .* did you mean 'verify'\? \(from .*graphshard\.toml\)"),
        (b"verify = 'of'", r"GS103: option verify='of'; .* \(from .*graphshard\.toml\)"),
        (b"micro_steps = 1.5", r"GS103: option micro_steps=1\.5; .* \(from .*graphshard\.toml\)"),
        (b"dump_dir = 2026-01-01", r"GS103: option dump_dir=datetime\.date.* is not a path"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(folder, text, message):
    (folder.parent / "graphshard.toml").write_bytes(text)
    with pytest.raises(OptionsError, match=message):
        parse_options(None)
    assert probe_options().finding is not None


def test_a_project_file_is_read_only_if_it_has_a_table(folder, tmp_path, monkeypatch):
    project = folder.parent / "pyproject.toml"
    for other in (
        b"[tool.",
        b"\xff",
        b"tool = 3",
        b"[tool]\ngraphshard = 3",
        b"a = " + b"[" * 5000,
    ):
        project.write_bytes(other)
        assert parse_options(None) == Options()
    project.write_text("[tool.graphshard\n")
    with pytest.raises(OptionsError, match=r"GS106: .*pyproject\.toml is no TOML"):
        parse_options(None)
    project.write_text("[project]\n")
    monkeypatch.setenv(CONFIG, str(project))
    with pytest.raises(OptionsError, match=r"GS106: .*pyproject\.toml has no table \[tool\.grap"):
        parse_options(None)
    monkeypatch.setenv(CONFIG, str(tmp_path / "gone.toml"))
    with pytest.raises(OptionsError, match=r"GS106: options: cannot read .*gone\.toml: No such"):
        parse_options(None)


def test_a_removed_working_directory_has_no_file(folder):
    folder.rmdir()
    assert parse_options(None) == Options()


def test_a_name_alone_is_compiled_with_them_and_explain_says_whence(folder, monkeypatch):
    """Also what is compiled later, whatever happened to the file meanwhile."""
    (folder / "graphshard.toml").write_text('compute = "aten"\nfallback = "error"\n')
    monkeypatch.setenv(OPTIONS, "verify=off")
    with pretended(1):
        model = fully_shard(nn.Linear(4, 4))
        model.compile(backend="graphshard", dynamic=False)
        (folder / "graphshard.toml").write_text("nonsense = 1\n")
        for rows in (2, 3):
            model(torch.ones(rows, 4)).sum().backward()
        said = explain(model)
        torch._dynamo.reset()
    assert len(said.plans) == 2
    assert str(said).splitlines()[-3:] == [
        f"option       compute='aten' from {folder / 'graphshard.toml'}",
        f"option       fallback='error' from {folder / 'graphshard.toml'}",
        "option       verify='off' from GRAPHSHARD_OPTIONS",
    ]


def test_the_doctor_says_what_is_set(folder, monkeypatch):
    assert probe_options().found == "none in the environment or a file"
    (folder / "graphshard.toml").write_text("micro_steps = 2\n")
    monkeypatch.setenv("GRAPHSHARD_COMPUTE", "aten")
    probe = probe_options()
    assert probe.finding is None
    file = folder / "graphshard.toml"
    assert probe.found == f"compute='aten' from GRAPHSHARD_COMPUTE, micro_steps=2 from {file}"
