"""What is true of a model between two steps, also where one of them failed: each parameter is a
DTensor again, and nothing is gathered."""

from torch import nn
from torch.distributed.tensor import DTensor

from graphshard.capture.root_state import root_states_under


def assert_sharded(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is a {type(param).__name__}"


def assert_clean(model: nn.Module) -> None:
    assert_sharded(model)
    for record in root_states_under(model):
        assert all(live.kept is None and live.fsdp.is_sharded for live in record.groups)
