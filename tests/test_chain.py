"""Blocks that read more than what the block before them made are not counted from a few."""

import os
from collections import Counter
from functools import partial

import pytest
import torch
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from offline_models import studied
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphshard.offline.repeats import CAPTURED

DEPTH = 2 * CAPTURED + 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x, other):
        return x + self.second(torch.tanh(self.first(x)) * other)


class Net(nn.Module):
    """other: what a block is given besides, from its number and all that was made before it."""

    def __init__(self, other, embeds):
        super().__init__()
        self.embed = nn.Linear(8, 8) if embeds else nn.Identity()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.other = other

    def forward(self, x):
        made = [self.embed(x)]
        for number, layer in enumerate(self.layers):
            made.append(layer(made[-1], self.other(number, made)))
        return made[-1].sum()


def reach(blocks):
    return lambda number, made: made[max(0, number - blocks)]


def made_of(blocks):
    return lambda number, made: torch.sin(made[max(0, number - blocks)])


def every(blocks):
    return lambda number, made: made[-1] * made[-1] if number % blocks == 0 else made[-1]


def drawn(back, apply, blocks):
    """What is so many blocks back, or in every few blocks the last result."""

    def other(number, made):
        return apply(made[-1] if number % blocks == 0 else made[max(0, number - back)])

    return other


def built(other, embeds):
    model = Net(other, embeds)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.zeros(4, 8)


@pytest.mark.parametrize("embeds", [False, True], ids=["given", "embedded"])
@pytest.mark.parametrize(
    "other",
    [
        reach(0),
        *(pytest.param(reach(n), id=f"{n} back") for n in (1, 2, 3, CAPTURED, DEPTH)),
        *(pytest.param(made_of(n), id=f"made of {n} back") for n in (0, CAPTURED, DEPTH)),
        *(pytest.param(every(n), id=f"every {n}") for n in (2, 3, 4)),
    ],
)
def test_what_a_few_blocks_say_is_what_the_whole_says(other, embeds):
    (ours, short), (theirs, whole) = (
        studied(partial(built, other, embeds), whole=whole) for whole in (False, True)
    )
    assert ours.estimate == theirs.estimate
    assert short.costs.by_direction == whole.costs.by_direction
    assert Counter(short.costs.lifetimes) == Counter(whole.costs.lifetimes)


@drawing(8, os.environ.get("GRAPHSHARD_FUZZ_SEED"))
@given(
    back=st.integers(0, DEPTH),
    apply=st.sampled_from([torch.sin, torch.detach, lambda x: x, lambda x: x.sum(0) + x]),
    blocks=st.integers(2, DEPTH + 1),
    embeds=st.booleans(),
)
def test_drawn_blocks(back, apply, blocks, embeds):
    test_what_a_few_blocks_say_is_what_the_whole_says(drawn(back, apply, blocks), embeds)
