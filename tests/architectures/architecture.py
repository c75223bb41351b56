"""An architecture of somebody's library, and the batches that models are given.

Sizes are the least with which a model of its kind still does what it does: several blocks and
heads, dropout as its configuration has it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROWS, LENGTH, VOCAB, DIM, IMAGE = 2, 16, 128, 32, 32

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """batch: keyword arguments of the model, other ones for each seed. whole: it is sharded as one
    group, since what is outside of its blocks uses parts of them."""

    name: str
    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    whole: bool = False


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int) -> Batch:
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def both_sides(seed: int) -> Batch:
    """Of a model with an encoder and a decoder."""
    ids = tokens(seed)["input_ids"]
    return {"input_ids": ids, "labels": ids[:, : LENGTH // 2].clone()}


def noise(name: str, *size: int, seed: int) -> Batch:
    return {name: torch.randn(ROWS, *size, generator=generator(seed))}


def images(seed: int) -> Batch:
    return noise("pixel_values", 3, IMAGE, IMAGE, seed=seed)


def sound(seed: int) -> Batch:
    return noise("input_values", 1600, seed=seed)


def pairs(seed: int) -> Batch:
    """Images and their texts."""
    return {"input_ids": tokens(seed)["input_ids"], **images(seed)}
