"""Says whether a user's function makes the same model each time it is called.

Planning calls it again for each number of ranks, and where blocks of a model are to be captured
anew (`graphshard.offline.recut`). Assumed there: what is made has the same modules and parameters,
so that figures of one capture are those of another; at other sizes, the same parameters. A function
that counts up a global or draws a width does not keep to that (`tests/test_same_model.py` draws
such ones). What a forward itself reads of globals is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn

from graphshard import fsdp2
from graphshard.errors import OfflineError
from graphshard.offline.repeats import plain_attributes
from graphshard.offline.target import Sizes
from graphshard.offline.world import Made, shapes

# What stands where: "module layers.0", "parameter layers.0.weight" -> its class, shape and so on.
_Parts: TypeAlias = Mapping[str, tuple[Any, ...]]
_PARAMETER = "parameter"


@dataclass(slots=True)
class SameModel:
    """Calls `build`, and compares what it makes with what it made before.

    varies: plain attributes of modules were not the same, which may change what forward does.
    """

    build: Callable[[Sizes], Made]
    varies: bool = False
    _parts: dict[tuple[Sizes, int], _Parts] = field(default_factory=dict)
    _params: dict[int, _Parts] = field(default_factory=dict)  # at all sizes, by the ranks
    _plain: dict[tuple[Sizes, int], tuple[Any, ...]] = field(default_factory=dict)

    def __call__(self, sizes: Sizes) -> Made:
        """Raises OfflineError (GS913) for another model than before, on as many ranks."""
        made = self.build(sizes)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        key = sizes, ranks
        parts, plain = dict(_parts_of(made)), _plain_of(made.model)
        if (what := _difference(self._parts.setdefault(key, parts), parts)) is not None:
            raise OfflineError(
                "GS913",
                f"the function made another model when it was called again: {what}; planning "
                "calls it more than once, so let what it makes hang on its arguments alone",
            )
        params = {name: part for name, part in parts.items() if name.startswith(_PARAMETER)}
        if (what := _difference(self._params.setdefault(ranks, params), params)) is not None:
            raise OfflineError(
                "GS913",
                f"the function makes other parameters at other sizes: {what}; plan these sizes one "
                "by one",
            )
        self.varies = self.varies or self._plain.setdefault(key, plain) != plain
        return made


def _parts_of(made: Made) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, module in made.model.named_modules():
        yield f"module {name or '(root)'}", (_class_of(module), module.training, _policy_of(module))
    for name, param in made.model.named_parameters():
        placed = getattr(param, "placements", None)
        yield (
            f"{_PARAMETER} {name}",
            (tuple(param.shape), str(param.dtype), f"requires_grad={param.requires_grad}", placed),
        )
    for name, buffer in made.model.named_buffers():
        yield f"buffer {name}", (tuple(buffer.shape), str(buffer.dtype))
    for number, shape in enumerate(shapes(made)):
        yield f"input {number}", shape


def _policy_of(module: nn.Module) -> Any:
    if isinstance(module, fsdp2.ShardedModule):
        return fsdp2.mixed_precision(fsdp2.state_of(module))
    return None


def _class_of(module: nn.Module) -> str:
    """Not the class itself, which may be made in each call, too."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _plain_of(model: nn.Module) -> tuple[Any, ...]:
    return tuple(plain_attributes(module) for module in model.modules())


def _difference(before: _Parts, now: _Parts) -> str | None:
    """The first part that is not as it was."""
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if old is None or new is None:
            return f"{name} was {'not' if old is None else 'only'} there the first time"
        pairs = zip(old, new, strict=False)
        return f"{name} has {next((f'{b}, not {a}' for a, b in pairs if a != b), 'another rank')}"
    return None
