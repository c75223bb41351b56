"""An auto_wrap_policy in; the modules to shard, children first, the given one last, out.

The choice is that of FSDP1: a policy object says which modules and with which arguments; a function
is asked twice for each module, whether to look inside and whether to shard what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from graphshard.errors import MigrateError
from graphshard.migrate.arguments import Arguments


@dataclass(frozen=True, slots=True)
class Ignored:
    """What stays unsharded. modules: with all modules inside. params: in the modules' order."""

    modules: tuple[nn.Module, ...] = ()
    params: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True, slots=True)
class WrapUnit:
    """One module to shard; fqn is empty for the root. apart: left out of mixed precision."""

    fqn: str
    module: nn.Module
    arguments: Arguments
    apart: bool = False


def units_of(
    root: nn.Module, policy: Any, arguments: Arguments, ignored: Ignored
) -> tuple[WrapUnit, ...]:
    """Children before parents, `root` last. Raises MigrateError (GS1002) for a bad policy."""
    # Modules hash by identity; the values are FSDP1's arguments of each.
    chosen: dict[nn.Module, Arguments] = {}
    apart = _apart_classes(arguments) if policy is not None else ()
    if hasattr(policy, "_run_policy"):
        chosen = _ask_object(root, policy, arguments, ignored)
    elif callable(policy):
        chosen = dict.fromkeys(_ask_function(root, policy, apart, ignored), arguments)
    elif policy is not None:
        raise MigrateError(
            "GS1002",
            "auto_wrap_policy= takes a function (module, recurse, nonwrapped_numel) or a policy of "
            f"torch.distributed.fsdp.wrap, got {policy!r}",
        )
    names = {module: name for name, module in root.named_modules()}
    units = []
    for module in post_order(root):
        if module is root or module in ignored.modules:
            continue
        alone = isinstance(module, apart)
        if alone or module in chosen:
            own = chosen.get(module, arguments)
            units.append(WrapUnit(names[module], module, own, alone))
    return (*units, WrapUnit("", root, arguments))


def post_order(root: nn.Module) -> Iterator[nn.Module]:
    """Each module once, children before parents, in the order of registration."""
    seen: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        seen[module] = None
        for child in module.children():
            if child not in seen:
                yield from visit(child)
        yield module

    return visit(root)


def _apart_classes(arguments: Arguments) -> tuple[type[nn.Module], ...]:
    """FSDP1 shards these apart, without mixed precision: batch norms, if nothing else is said."""
    mixed = arguments.mixed_precision
    return () if mixed is None else tuple(mixed._module_classes_to_ignore)


def _ask_object(
    root: nn.Module, policy: Any, arguments: Arguments, ignored: Ignored
) -> dict[nn.Module, Arguments]:
    """`ModuleWrapPolicy`, `CustomPolicy` and their kin fill in and override keyword arguments."""
    known = tuple(f.name for f in fields(Arguments))
    given = {name: getattr(arguments, name) for name in known}
    chosen = {}
    for module, keywords in policy._run_policy(root, set(ignored.modules), dict(given)).items():
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise MigrateError(
                "GS1002", f"auto_wrap_policy gave {', '.join(unknown)}=, which is for the root only"
            )
        changed = {k: v for k, v in keywords.items() if v is not given[k]}
        chosen[module] = replace(arguments, **changed)
    return chosen


def _ask_function(
    root: nn.Module,
    policy: Callable[..., bool],
    apart: tuple[type[nn.Module], ...],
    ignored: Ignored,
) -> list[nn.Module]:
    found: list[nn.Module] = []
    kept = {id(p) for p in ignored.params}

    def ask(module: nn.Module, recurse: bool, numel: int) -> bool:
        # Classes apart are looked for everywhere, so FSDP1 looks inside every module then.
        also = bool(apart) and (recurse or isinstance(module, apart))
        return bool(policy(module=module, recurse=recurse, nonwrapped_numel=numel)) or also

    def visit(module: nn.Module) -> int:
        """How many parameters (numel) are sharded in or below `module`."""
        numel = sum(p.numel() for p in module.parameters() if id(p) not in kept)
        if not ask(module, True, numel):
            return 0
        inside = sum(visit(c) for c in module.children() if c not in ignored.modules)
        if module is root or not ask(module, False, numel - inside):
            return inside
        if module not in found:
            found.append(module)
        return numel

    visit(root)
    return found
