"""Tuning: groupings without a capture of their own, what models keep, and the code."""

from functools import cache, partial

import pytest
import torch
from offline_models import Block, Net, TwoRows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tune_models import (
    DEPTH,
    MIXED,
    PER_NODE,
    WORLD,
    Checkpointed,
    by_block,
    columns,
    found_in,
    net,
    setting,
    sizes_of,
    subject_of,
)
from tune_truth import captured, compare, described, ran

from graphshard.fsdp2.undo import sharding_of, undo
from graphshard.offline.world import pretended
from graphshard.schedule.setting import (
    Checkpointing,
    Grouping,
    MeshShape,
    Obstacle,
    Resharding,
)
from graphshard.tune.code import code_of
from graphshard.tune.modules import groupings_of, owner_of
from graphshard.tune.pricing import Pricer
from graphshard.tune.search import (
    Asked,
    space_of,
)

# -- groupings -----------------------------------------------------------------------------------


def test_groupings_of_a_model_in_two_rows():
    with torch.device("meta"):
        found = groupings_of(TwoRows(4), sharding_of(TwoRows(4)), "")
    calls = found.calls
    assert set(calls) == {Grouping.BLOCKS, Grouping.PAIRS, Grouping.QUADS, Grouping.WHOLE}
    assert calls[Grouping.WHOLE] == (("",),)
    assert calls[Grouping.PAIRS][:2] == (("encoder.0", "encoder.1"), ("encoder.2", "encoder.3"))
    assert calls[Grouping.QUADS][1] == tuple(f"decoder.{n}" for n in range(4))
    assert len(calls[Grouping.BLOCKS]) == 9
    assert found.finest == calls[Grouping.BLOCKS]


def test_large_modules_outside_of_blocks_may_be_apart_and_tied_ones_not():
    with torch.device("meta"):
        model = net()
        apart = groupings_of(model, sharding_of(model), "").calls[Grouping.APART]
        assert set(apart) == {*((f"blocks.{n}",) for n in range(4)), ("embedding",), ("",)}
        model.head = nn.Linear(64, 512, bias=False)
        model.head.weight = model.embedding.weight
        assert Grouping.APART not in groupings_of(model, sharding_of(model), "").calls


class ReadsElsewhere(Net):
    """The head is the embedding's weight, which its own group would have let go."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embedding.weight).logsumexp(-1).mean()


def reads_elsewhere():
    model = ReadsElsewhere(nn.ModuleList(Block(64) for _ in range(4)), 64)
    model.embedding = nn.Embedding(512, 64)
    del model.head
    return model


def test_a_module_whose_parameters_are_read_elsewhere_is_in_no_group_of_its_own():
    subject = subject_of(make=reads_elsewhere, batches=(1,))
    assert subject.kept is None
    assert {Grouping.BLOCKS, Grouping.PAIRS} & subject.groupings.calls.keys()
    assert Grouping.APART not in subject.groupings.calls
    assert Pricer(subject).price(setting(Grouping.PAIRS)).plan is not None


def test_what_a_call_shards_is_that_of_the_nearest_module():
    calls = (("a.b", "c"), ("a",), ("",))
    assert owner_of("a.b.weight", calls) == ("a.b", "c")
    assert owner_of("a.bc.weight", calls) == ("a",)
    assert owner_of("d", calls) == ("",)


WAYS = {
    "mixed": (partial(by_block, mp_policy=MIXED), partial(net, DEPTH)),
    "nested": (partial(by_block, nested=True), partial(net, 3)),
    "columns": (partial(by_block, shard_placement_fn=columns), partial(net, 3)),
    "unsharded": (None, partial(net, DEPTH)),
    "checkpointed": (by_block, partial(net, 3, Checkpointed)),
    "root only": (fully_shard, partial(net, 3)),
}


@cache
def subject_in(way):
    return subject_of(*WAYS[way], batches=(1,))


@pytest.mark.parametrize("way", WAYS)
def test_groupings_are_priced_as_if_they_had_been_captured(way):
    subject = subject_in(way)
    for place, grouping in enumerate(subject.groupings.calls):
        real_costs = captured(subject, setting(grouping))
        # Meshes in turn: each grouping has one, each mesh a grouping.
        shards = (WORLD, 8, PER_NODE)[place % 3]
        rules = [Resharding.OPEN, Resharding.NEVER]
        rules += [Resharding.NODE] if shards > PER_NODE else [Resharding.ALWAYS]
        for reshard in rules:
            compare(subject, setting(grouping, shards, reshard), real_costs)


# -- models that keep something -------------------------------------------------------------------


def over_tensor_parallel(model):
    mesh = init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def with_a_method(model):
    by_block(model)
    register_fsdp_forward_method(model, "extra_repr")


def several_roots(model):
    for block in model.blocks:
        fully_shard(block)


def test_tensor_parallel_keeps_its_meshes_and_may_have_other_groups():
    subject = subject_of(over_tensor_parallel, batches=(1,))
    space, found = found_in(subject)
    assert (subject.kept, subject.moves) == (None, False)
    assert subject.data_ranks(WORLD) == 8
    assert space.shapes == (None,)
    assert Grouping.PAIRS in space.groupings
    assert found.best is not None


@pytest.mark.parametrize(
    ("shard_it", "why"), [(with_a_method, Obstacle.METHODS), (several_roots, Obstacle.ROOTS)]
)
def test_what_cannot_be_sharded_anew_keeps_its_calls(shard_it, why):
    subject = subject_of(shard_it, batches=(1,))
    space, found = found_in(subject)
    assert subject.kept is why
    assert (space.shapes, space.groupings) == ((None,), (Grouping.AS_IS,))
    assert found.best.setting.reshard is Resharding.OPEN
    code = code_of(subject, subject.bare(), found.best.setting)
    assert '"reshard": "auto"' in code
    assert "def shard" not in code


# -- code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["mixed", "nested", "columns", "unsharded"])
def test_the_code_makes_the_groups_and_the_mesh(way):
    subject = subject_in(way)
    model = subject.bare()
    rules = [Resharding.OPEN, Resharding.NODE, Resharding.NEVER, Resharding.ALWAYS]
    for place, grouping in enumerate(subject.groupings.calls):
        wanted = setting(grouping, (WORLD, 8)[place % 2], rules[place % 4])
        found, names = ran(code_of(subject, model, wanted), subject, wanted)
        assert found == described(subject, wanted)
        assert names["OPTIONS"]["memory_budget"] == 2**33
        assert (names["SIZES"], names["MICRO_STEPS"]) == (dict(wanted.sizes), 1)


def test_each_block_checkpointed_is_priced_with_all_blocks():
    subject = subject_of(make=partial(net, DEPTH), batches=(1,))
    space_of(subject, WORLD, Asked(2**33, (sizes_of(1),)))  # which looks at worlds with few blocks
    full, plain = (
        subject.costs(setting(checkpointing=kind))
        for kind in (Checkpointing.FULL, Checkpointing.AS_IS)
    )
    assert [info.fqn for info in full.groups] == [info.fqn for info in plain.groups]


def test_the_code_checkpoints_blocks():
    subject = subject_of(batches=(1,))
    wanted = setting(checkpointing=Checkpointing.FULL)
    code = code_of(subject, subject.bare(), wanted)
    with pretended(WORLD):
        made = subject.build(wanted.sizes)
        undo(made.model)
        names = {}
        exec(compile(code, "tuned", "exec"), names)
        names["shard"](made.model, device_type="cpu")
        kinds = {type(block).__name__ for block in made.model.blocks}
    assert kinds == {"FSDPCheckpointWrapper"}
    assert names["OPTIONS"]["recompute"] == "user"


def test_meshes_that_would_cut_unevenly_are_left_out():
    def over_half(model):
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
        by_block(model, mesh=mesh, shard_placement_fn=columns)

    subject = subject_of(over_half, partial(net, dim=24), batches=(1,))
    space = space_of(subject, WORLD, Asked(2**33, (sizes_of(1),)))
    assert space.shapes == (MeshShape(4, 4), MeshShape(2, 8))
