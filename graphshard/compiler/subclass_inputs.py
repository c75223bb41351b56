"""Inputs that are subclasses of Tensor without a dispatch of their own: images that know their
metadata, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch._functorch.config
from torch import Tensor, nn


def taking_subclasses(run: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """What Dynamo calls in place of `run`, which AOTAutograd may have made.

    In its first call AOTAutograd looks at custom ops, in a dispatch mode that refuses such inputs
    (up to torch 2.14). Where there is one, ops go without that look. Assumed: inputs of later calls
    have the types of `example_inputs`, which Dynamo guards.
    """
    if not any(map(_has_no_dispatch, example_inputs)):
        return run

    # In each call: the first one may be of another thread, or fail.
    def call(*args: Any) -> Any:
        with torch._functorch.config.patch(check_custom_op_aliasing=False):
            return run(*args)

    return call


def _has_no_dispatch(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and type(value) not in (Tensor, nn.Parameter)
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
    )
