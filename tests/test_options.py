"""`options=` and the environment."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import _inductor

import graphshard
from graphshard.compiler.device_memory import STEP_BYTES
from graphshard.compiler.planning_inputs import policy_of
from graphshard.cost.presets import preset
from graphshard.cost.profile import look_up
from graphshard.errors import GraphshardError, OptionsError
from graphshard.options import Options, is_disabled, parse_options
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Reshard

KEYS = (
    "compute, fallback, dump_dir, memory_budget, reshard, machine, micro_steps, "
    "overlap_optimizer, replan_after, verify, schedule, report_dir, promote, recompute, offload, "
    "optimizer, clip"
)

DUMP, DISABLE = "GRAPHSHARD_DUMP_DIR", "GRAPHSHARD_DISABLE"
COMPUTE = "GRAPHSHARD_COMPUTE"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in (DUMP, DISABLE, COMPUTE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("nothing", [None, {}])
def test_defaults(nothing):
    assert parse_options(nothing) == Options("inductor", "warn", None)


def test_every_option_is_taken(tmp_path):
    given = {"compute": "aten", "fallback": "error", "dump_dir": str(tmp_path)}
    assert parse_options(given) == Options("aten", "error", tmp_path)
    assert parse_options({"dump_dir": tmp_path}).dump_dir == tmp_path


def test_options_go_over_the_environment_over_the_default(monkeypatch):
    monkeypatch.setenv(DUMP, "from_env")
    assert parse_options(None).dump_dir == Path("from_env")
    assert parse_options({"dump_dir": "from_options"}).dump_dir == Path("from_options")
    monkeypatch.setenv(DUMP, "")
    assert parse_options(None).dump_dir is None


def test_the_environment_says_how_compute_runs_where_the_options_do_not(monkeypatch):
    monkeypatch.setenv(COMPUTE, "aten")
    assert parse_options(None).compute == "aten"
    assert parse_options({"compute": "inductor"}).compute == "inductor"
    monkeypatch.setenv(COMPUTE, "")
    assert parse_options(None).compute == "inductor"
    monkeypatch.setenv(COMPUTE, "fast")
    with pytest.raises(OptionsError, match="GS103: option compute='fast'"):
        parse_options(None)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"fallbak": "warn"}, "GS102", "unknown option 'fallbak'; did you mean 'fallback'?"),
        ({"zzz": 1}, "GS102", f"unknown option 'zzz'; known keys: {KEYS}"),
        ({"compute": "fast"}, "GS103", "option compute='fast'; choose one of ('aten', 'inductor')"),
        (
            {"fx_graph_cach": 1},
            "GS102",
            "unknown option 'fx_graph_cach'; did you mean 'fx_graph_cache'?",
        ),
        ({"fallback": True}, "GS103", "option fallback=True; choose one of ('warn', 'error')"),
        ({"fallback": None}, "GS103", "option fallback=None; choose one of ('warn', 'error')"),
        ({"dump_dir": 7}, "GS103", "option dump_dir=7 is not a path"),
        ({"report_dir": 7}, "GS103", "option report_dir=7 is not a path"),
    ],
)
def test_what_is_wrong_is_named(options, code, message):
    with pytest.raises(OptionsError) as caught:
        parse_options(options)
    assert str(caught.value) == f"{code}: {message}"
    assert caught.value.code == code
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GraphshardError)


def test_a_key_that_is_no_string_is_named_too():
    with pytest.raises(OptionsError, match="unknown option 3; known keys: "):
        parse_options({3: "warn"})


def test_modes_are_those_of_inductor():
    assert parse_options(None, mode="default") == parse_options(None, mode=None)
    for mode, settings in _inductor.list_mode_options().items():
        assert parse_options(None, mode=mode).inductor == tuple(sorted(settings.items()))
    with pytest.raises(OptionsError, match=r"GS101: mode='fast' is none of Inductor's: default, "):
        parse_options(None, mode="fast")


def test_settings_of_inductor_pass_through_beside_graphshards_own():
    given = {"triton.cudagraphs": True, "fallback": "error", "fallback-random": True}
    assert parse_options(given) == Options(
        fallback="error", inductor=(("fallback_random", True), ("triton.cudagraphs", True))
    )


def test_settings_go_over_those_of_the_mode():
    settings = dict(parse_options({"max_autotune": False}, mode="max-autotune").inductor)
    assert settings["max_autotune"] is False
    assert settings["coordinate_descent_tuning"] is True


def test_nothing_is_compiled_with_aten_so_settings_of_inductor_are_refused(monkeypatch):
    message = "GS104: compute='aten' compiles nothing: leave out max_autotune"
    with pytest.raises(OptionsError, match=message):
        parse_options({"compute": "aten", "max_autotune": True})
    monkeypatch.setenv(COMPUTE, "aten")
    with pytest.raises(OptionsError, match=r"GS104: .* leave out mode="):
        parse_options(None, mode="reduce-overhead")
    assert parse_options(None, mode="default").compute == "aten"


@pytest.mark.parametrize("mode", [["default"], 3, {}.keys()])
def test_a_mode_that_is_no_name(mode):
    with pytest.raises(OptionsError, match=r"GS101: mode=.* is no name of a mode"):
        parse_options(None, mode=mode)


@pytest.mark.parametrize("options", [3, "aten", [("compute", "aten")]])
def test_options_that_are_no_dict(options):
    with pytest.raises(OptionsError, match=r"GS103: options=.* is no dict"):
        parse_options(options)


@pytest.mark.parametrize("given", [{3: "aten"}, {("a", "b"): 1}, {"compute": ["aten"]}])
def test_options_of_other_types(given):
    with pytest.raises(OptionsError, match=r"GS10[23]: "):
        parse_options(given)


def test_a_machine_is_looked_up_at_once(tmp_path):
    message = (
        r"GS103: option machine='h100x': no preset 'h100x': did you mean 'h100'\? Else give one"
    )
    with pytest.raises(OptionsError, match=message):
        parse_options({"machine": "h100x"}, machine=look_up)
    with pytest.raises(OptionsError, match=r"did you mean 'h100-ib400'\?"):
        parse_options({"machine": "h10-ib40"}, machine=look_up)
    with pytest.raises(OptionsError, match=r"GS103: option machine=.*gone.json.*No such file"):
        parse_options({"machine": str(tmp_path / "gone.json")}, machine=look_up)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(OptionsError, match=r"GS103: option machine=.*broken.json: not JSON"):
        parse_options({"machine": tmp_path / "broken.json"}, machine=look_up)
    assert parse_options({"machine": "h100-ib400"}, machine=look_up).machine == "h100-ib400"


def test_torch_compile_refuses_a_machine_that_there_is_not():
    with pytest.raises(OptionsError, match="machine='h100x'"):
        torch.compile(torch.nn.Linear(2, 2), backend="graphshard", options={"machine": "h100x"})(
            torch.ones(1, 2)
        )


def test_options_are_read_only_and_the_callers_dict_stays_as_it_is():
    given = {"fallback": "error"}
    with pytest.raises(AttributeError):
        parse_options(given).fallback = "warn"
    assert given == {"fallback": "error"}


@pytest.mark.parametrize(
    ("value", "disabled"), [("1", True), ("yes", True), ("0", False), ("", False)]
)
def test_the_kill_switch(monkeypatch, value, disabled):
    monkeypatch.setenv(DISABLE, value)
    assert is_disabled() is disabled


def test_graphshard_is_on_by_default():
    assert is_disabled() is False


@pytest.mark.parametrize(
    ("given", "size"), [(1000, 1000), ("70GiB", 70 * 2**30), ("1.5 MB", 1_500_000), ("12", 12)]
)
def test_a_memory_budget_is_a_number_of_bytes(given, size):
    assert parse_options({"memory_budget": given}).memory_budget == size


def test_who_decides_about_the_schedule():
    def policy(**given):
        return policy_of(parse_options(given), preset("h100-ib400"))

    assert policy(schedule="fsdp2") == PlanningPolicy(most_ahead=1)
    planned = PlanningPolicy(reshard=Reshard.OPEN, recompute=True, regroup=True)
    assert policy() == policy(schedule="planned") == policy(memory_budget="fsdp2") == planned
    freely = replace(planned, replaces_checkpoints=True)
    tightly = replace(freely, budget_bytes=10, offload=True)
    assert policy(schedule="planned", memory_budget=10) == tightly
    assert policy(memory_budget=10) == tightly
    assert policy(memory_budget=10, offload="never") == replace(tightly, offload=False)
    as_user_says = replace(tightly, replaces_checkpoints=False)
    assert policy(memory_budget=10, recompute="user") == as_user_says
    assert policy(recompute="auto") == freely
    device = policy(memory_budget="device")
    assert replace(device, budget_bytes=10) == tightly
    capacity = preset("h100").processor.capacity_bytes
    assert 0.9 * capacity - STEP_BYTES < device.budget_bytes <= 0.9 * capacity
    assert policy(reshard="auto") == replace(planned, reshard=Reshard.AUTO)


@pytest.mark.parametrize("key", ["memory_budget", "reshard", "recompute"])
def test_fsdp2s_own_schedule_plans_nothing(key, monkeypatch):
    value = {"memory_budget": "1GB"}.get(key, "auto")
    with pytest.raises(
        OptionsError, match=f"GS103: schedule='fsdp2' plans nothing: leave out {key}"
    ):
        parse_options({"schedule": "fsdp2", key: value})
    monkeypatch.setenv("GRAPHSHARD_OPTIONS", f"{key}={value}")
    assert parse_options({"schedule": "fsdp2"}) == Options(schedule="fsdp2")
    monkeypatch.setenv("GRAPHSHARD_OPTIONS", "schedule=fsdp2")
    with pytest.raises(OptionsError, match=f"leave out {key}"):
        parse_options({key: value})


@pytest.mark.parametrize("given", ["lots", "70 TiB", -1, 1.5, True])
def test_a_bad_memory_budget_is_refused(given):
    with pytest.raises(ValueError, match=r"GS103: option memory_budget=.* is no size"):
        parse_options({"memory_budget": given})


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"options": 3}, "GS103: options=3 is no dict"),
        ({"options": [1]}, "GS103"),
        ({"options": "aten"}, "GS103"),
        ({"options": {3: 1}}, "GS102: unknown option 3"),
        ({"options": {"compute": "aten", 3: 1}}, "GS102"),
        ({"options": {"compute": []}}, "GS103"),
        ({"options": {"micro_steps": 10**400}}, "GS103: option micro_steps=that many; give"),
        ({"options": {"memory_budget": "9" * 400}}, "GS103: option memory_budget: more than"),
        ({"mode": ["default"]}, r"GS101: mode=\['default'\] is no name of a mode"),
        ({"mode": 3}, "GS101"),
    ],
)
def test_odd_values_of_torch_compile_say_what_is_wrong(given, code):
    with pytest.raises(OptionsError, match=code):
        torch.compile(torch.nn.Linear(2, 2), backend="graphshard", **given)(torch.ones(1, 2))


def test_an_empty_list_as_mode():
    with pytest.raises(OptionsError, match="GS101"):
        parse_options(None, [])


@pytest.mark.parametrize("ranks", [0, -1, None, "8", 10**20, 2.0, True])
def test_numbers_of_ranks_that_are_none(ranks):
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(OptionsError, match="GS103: option world_size"):
        graphshard.plan(model, (torch.ones(1, 2),), world_size=ranks, hardware="h100")
