"""A setting in; the Python file that sets it out.

The file has a function `shard` that takes the place of the model's own `fully_shard` calls, and the
options of the backend. Modules go by their names; those that differ in a number only are a loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from graphshard.migrate.code import policy_text
from graphshard.schedule.setting import Checkpointing, MeshShape, Resharding, Setting
from graphshard.tune.layout import TENSOR, Policies, argument, data_dims, dims_of, policies_of
from graphshard.tune.modules import Modules
from graphshard.tune.pricing import options_of
from graphshard.tune.subject import Subject
from graphshard.tune.tensor_parallel import ATTRIBUTE, WORDS, TensorPlan, word_texts

INDENT = "    "
APPLY = "parallelize_module"


def code_of(subject: Subject, model: nn.Module, setting: Setting) -> str:
    """model: without shards, as `subject` is."""
    lines = list(_head(subject, setting))
    if subject.groupings is not None:
        lines += ["", "", *_function(subject, model, setting)]
    return "\n".join(lines) + "\n"


def _head(subject: Subject, setting: Setting) -> Iterator[str]:
    yield f'"""{subject.name} on {setting.world_size:,} GPUs, as `graphshard tune` found it."""'
    yield ""
    if subject.groupings is not None:
        yield from _imports(subject, setting)
        yield ""
    yield "# Of one rank's inputs in a micro-step, of which a step has MICRO_STEPS."
    yield f"SIZES = {json.dumps(dict(setting.sizes))}"
    yield f"MICRO_STEPS = {setting.micro_steps}"
    if setting.micro_steps > 1:
        yield "# Else model.set_requires_gradient_sync(False) before all micro-steps but the last."
        yield f"SYNC_EACH = {setting.sync_each}"
    yield '# model.compile(backend="graphshard", options=OPTIONS)'
    yield "OPTIONS = {"
    for name, value in options_of(subject, setting).items():
        yield f'{INDENT}"{name}": {_quoted(value)},'
    yield "}"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _imports(subject: Subject, setting: Setting) -> Iterator[str]:
    sharding = subject.sharding
    yield "import torch"
    if setting.checkpointing is Checkpointing.FULL:
        yield (
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import "
            "checkpoint_wrapper"
        )
    if setting.mesh is not None:
        yield "from torch.distributed.device_mesh import init_device_mesh"
    offloads = any(isinstance(call.offload, CPUOffloadPolicy) for call in sharding.calls)
    names = [*(["CPUOffloadPolicy"] if offloads else []), "MixedPrecisionPolicy", "fully_shard"]
    yield f"from torch.distributed.fsdp import {', '.join(names)}"
    words = ["Shard"] if sharding.dims else []
    plan = subject.tensor.plan if setting.tensor > 1 else None
    texts = [] if plan is None else word_texts(plan)
    words = [*(["Replicate"] if any("Replicate" in text for text in texts) else []), *words]
    if words:
        yield f"from torch.distributed.tensor import {', '.join(words)}"
    if plan is not None and plan.styles is not None:
        styles = sorted({text.split("(")[0] for text in texts})
        yield f"from torch.distributed.tensor.parallel import {', '.join([*styles, APPLY])}"


def _function(subject: Subject, model: nn.Module, setting: Setting) -> Iterator[str]:
    assert subject.groupings is not None
    sharding, calls = subject.sharding, subject.groupings.calls[setting.grouping]
    given = 'device_type: str = "cuda"' if setting.mesh is not None else "mesh"
    yield f"def shard(model: torch.nn.Module, {given}) -> torch.nn.Module:"
    yield f'{INDENT}"""Shards `model`, which is not sharded yet."""'
    body = [] if setting.mesh is None else list(_mesh_lines(setting.mesh, subject.tensor.plan))
    body += _tensors("ignored", {name: None for name in sharding.whole})
    body += _tensors("dims", dict(sharding.dims))
    if setting.checkpointing is Checkpointing.FULL:
        for names in subject.groupings.blocks:
            body += list(_loops([(name,) for name in names], _wrapping))
    policies = policies_of(model, sharding, calls)
    kinds = list(dict.fromkeys(policies.values()))
    for place, kind in enumerate(kinds):
        body += _settings_lines(_settings_name(place), kind, sharding.whole, sharding.dims)
    by_kind: dict[str, list[Modules]] = {}
    for modules in calls[:-1]:
        place = kinds.index(policies[modules]) if modules in policies else 0
        by_kind.setdefault(_settings_name(place), []).append(modules)
    extra = _reshard_text(setting.reshard, subject.machines.ranks_per_node)
    body += _sharding_lines(by_kind, extra)
    place = kinds.index(policies[calls[-1]]) if calls[-1] in policies else 0
    body.append(f"fully_shard({_module(calls[-1][0])}, **{_settings_name(place)})")
    yield from (INDENT + line for line in [*body, "return model"])


def _mesh_lines(shape: MeshShape, plan: TensorPlan | None) -> Iterator[str]:
    if shape.replicas == shape.tensor == 1:
        yield f"mesh = init_device_mesh(device_type, ({shape.shards},))"
        return
    dims = dims_of(shape)
    names = ", ".join(map(_quoted, dims))
    sizes = ", ".join(map(str, dims.values()))
    variable = "mesh" if shape.tensor == 1 else "whole"
    yield f"{variable} = init_device_mesh(device_type, ({sizes}), mesh_dim_names=({names}))"
    if shape.tensor > 1:
        assert plan is not None
        data = data_dims(shape)
        inner = _quoted(data) if isinstance(data, str) else ", ".join(map(_quoted, data))
        yield f"mesh = whole[{inner}]"
        yield from _plan_lines(plan, f'whole["{TENSOR}"]')


def _plan_lines(plan: TensorPlan, mesh: str) -> Iterator[str]:
    """Before the model is sharded, since it replaces parameters."""
    module = _module(plan.module)
    own = f"{module}.{ATTRIBUTE}"
    if plan.styles is None:
        yield f"{own}({mesh})"
    elif not word_texts(plan):
        yield f"{APPLY}({module}, {mesh}, {own})"
    else:
        yield "styles = {"
        for name, style in plan.styles.items():
            text = WORDS[style].text if isinstance(style, str) else f'{own}["{name}"]'
            yield f'{INDENT}"{name}": {text},'
        yield "}"
        yield f"{APPLY}({module}, {mesh}, styles)"


def _settings_name(place: int) -> str:
    return f"settings_{place}" if place else "settings"


def _settings_lines(
    name: str, kind: Policies, whole: Sequence[str], dims: Sequence[tuple[str, int]]
) -> Iterator[str]:
    yield f"{name} = {{"
    yield f'{INDENT}"mesh": mesh,'
    yield f'{INDENT}"mp_policy": {policy_text(kind.mixed_precision)},'
    if isinstance(kind.offload, CPUOffloadPolicy):
        pins = "" if kind.offload.pin_memory else "pin_memory=False"
        yield f'{INDENT}"offload_policy": CPUOffloadPolicy({pins}),'
    if whole:
        yield f'{INDENT}"ignored_params": ignored,'
    if dims:
        yield f'{INDENT}"shard_placement_fn": lambda param: Shard(dims.get(param, 0)),'
    yield "}"


def _reshard_text(reshard: Resharding, ranks_per_node: int) -> str:
    value = argument(reshard, ranks_per_node)
    return "" if value is None else f", reshard_after_forward={value}"


# -- loops ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Names that differ in their first number only. count: of neighbours in one call."""

    before: str
    after: str
    count: int

    @property
    def text(self) -> str:
        return f'f"{self.before}{{number}}{self.after}"'


def _split(name: str) -> tuple[str, int | None, str]:
    """ "layers.3.mlp" is ("layers.", 3, ".mlp"); without a number, (name, None, "")."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return name, None, ""
    before, after = ".".join([*parts[:at], ""]), ".".join(["", *parts[at + 1 :]])
    return before, int(parts[at]), after


def _sharding_lines(by_kind: Mapping[str, Sequence[Modules]], extra: str) -> Iterator[str]:
    """Children first, whatever their policies are."""
    rows: dict[tuple[int, str, _Pattern | Modules], list[Modules]] = {}
    for kind, calls in by_kind.items():
        for modules in calls:
            depth = max(name.count(".") for name in modules)
            rows.setdefault((-depth, kind, _pattern(modules) or modules), []).append(modules)
    for (_, kind, _), calls in sorted(rows.items(), key=lambda item: item[0][0]):

        def call(module: str, kind: str = kind) -> str:
            return f"fully_shard({module}, **{kind}{extra})"

        yield from _loops(calls, call)


def _pattern(modules: Modules) -> _Pattern | None:
    """None where the names are no neighbours."""
    found = [_split(name) for name in modules]
    kinds = {(before, after) for before, _, after in found}
    numbers = [number for _, number, _ in found if number is not None]
    if len(kinds) != 1 or len(numbers) != len(found):
        return None
    ((before, after),) = kinds
    return _Pattern(before, after, len(found))


def _loops(calls: Sequence[Modules], line: Callable[[str], str]) -> Iterator[str]:
    """One loop, if the numbers follow each other; else a line for each. line: of the text of a
    module or a list of them."""
    pattern = _pattern(calls[0])
    if len(calls) > 1 and pattern is not None:
        numbers = sorted(_split(name)[1] or 0 for modules in calls for name in modules)
        first, last, step = numbers[0], numbers[-1] + 1, pattern.count
        follows = numbers == list(range(first, last)) and all(
            [_split(n)[1] for n in modules] == list(range(low, low + step))
            for modules, low in zip(sorted(calls, key=lambda m: _split(m[0])[1] or 0),
                                    range(first, last, step), strict=False)
        )  # fmt: skip
        if follows and step == 1:
            yield f"for number in {_range(first, last)}:"
            yield INDENT + line(f"model.get_submodule({pattern.text})")
            return
        if follows:
            yield f"for first in range({first}, {last}, {step}):"
            yield f"{INDENT}numbers = range(first, first + {step})"
            yield f"{INDENT}run = [model.get_submodule({pattern.text}) for number in numbers]"
            yield INDENT + line("run")
            return
    for modules in calls:
        texts = [_module(name) for name in modules]
        yield line(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")


def _range(first: int, last: int) -> str:
    return f"range({first}, {last})" if first else f"range({last})"


def _module(name: str) -> str:
    return f'model.get_submodule("{name}")' if name else "model"


def _wrapping(module: str) -> str:
    """The line that replaces a module by what computes it again in backward."""
    replaced = module.replace("get_submodule", "set_submodule", 1).removesuffix(")")
    return f"{replaced}, checkpoint_wrapper({module}))"


def _tensors(variable: str, names: Mapping[str, int | None]) -> Iterator[str]:
    """Parameters by name: a set, or a dict of their dimensions."""
    if not names:
        return
    rows: dict[tuple[str, str, int | None], list[int]] = {}
    plain: list[tuple[str, int | None]] = []
    for name, dim in names.items():
        before, number, after = _split(name)
        if number is None:
            plain.append((name, dim))
        else:
            rows.setdefault((before, after, dim), []).append(number)
    yield f"{variable} = {{"
    for name, dim in plain:
        yield f'{INDENT}model.get_parameter("{name}"){_dim(dim)},'
    for (before, after, dim), numbers in rows.items():
        text = f'model.get_parameter(f"{before}{{number}}{after}")'
        every = sorted(numbers) == list(range(min(numbers), max(numbers) + 1))
        where = _range(min(numbers), max(numbers) + 1) if every else str(tuple(numbers))
        opening = "**{" if dim is not None else "*("
        closing = "}" if dim is not None else ")"
        yield f"{INDENT}{opening}{text}{_dim(dim)} for number in {where}{closing},"
    yield "}"


def _dim(dim: int | None) -> str:
    return "" if dim is None else f": {dim}"
