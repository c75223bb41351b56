"""What backward computes again frees what the planner was promised, and nothing else."""

import functools

import pytest
from test_offline import llama, net

from graphshard.cost.live import saved_memory
from graphshard.cost.presets import preset
from graphshard.draft import parts_of, repeating
from graphshard.ir import copy_of
from graphshard.offline.capture import capture
from graphshard.offline.target import made_of
from graphshard.offline.world import faked, pretended
from graphshard.sketch import basis_of


def saved_bytes(parts):
    """Of what forward hands to backward; what is gathered is not among it."""
    found = saved_memory(parts.placed.forward.graph).values()
    return sum({memory.name: memory.size_bytes for memory in found}.values())


@pytest.mark.parametrize("fused", [False, True], ids=["aten", "inductor"])
@pytest.mark.parametrize("build", [net, functools.partial(llama, "none")], ids=["net", "llama"])
def test_a_unit_frees_what_it_promises(build, fused):
    with pretended(8):
        fake = faked(lambda: made_of("net", build()))
        draft = capture(fake, "net").draft
        joint = draft.program.joint
        spare = copy_of(joint)
        parts = parts_of(draft, joint, fused=fused)
        found = basis_of(parts.placed, preset("h100"), recompute=True, fused=fused).units
        chosen = found[1:3]
        assert len(chosen) == 2
        again = repeating(draft, spare, parts, chosen, fused=fused)
    promised = sum(unit.saved_bytes for unit in chosen)
    assert saved_bytes(parts) - saved_bytes(again) == promised > 0
