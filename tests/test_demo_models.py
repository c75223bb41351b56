"""The models that come with the package: `demo:NAME`."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from graphshard.demo.models import MODELS
from graphshard.offline.target import target_of
from graphshard.offline.world import pretended

# Llama 3: arXiv 2407.21783; Mixtral: arXiv 2401.04088; the tiny ones: counted once.
PARAMETERS = {
    "llama3_8b": 8.03e9,
    "llama3_70b": 70.55e9,
    "llama3_405b": 405.8e9,
    "mixtral_8x7b": 46.7e9,
    "tiny_llama": 6_426_880,
    "tiny_moe": 7_608_576,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_sharded_and_has_its_size(name):
    target = target_of(f"demo:{name}")
    assert target.name == name
    assert {"batch", "seq"} == set(target.parameters) == set(target.defaults)
    with pretended(8), torch.device("meta"):
        made = target.build(target.sizes({"batch": 3, "seq": 64}))
    assert isinstance(made.model, FSDPModule)
    assert [x.shape for x in made.args] == [(3, 64)] * 2
    count = sum(p.numel() for p in made.model.parameters())
    assert count == pytest.approx(PARAMETERS[name], rel=1e-3)
