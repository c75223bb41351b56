"""Tuning with tensor parallel: where plans come from, what they cost, and the code."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from offline_models import Block
from tensor_models import (
    BY_SEQUENCE,
    DEPTH,
    DIM,
    IN_WORDS,
    OwnFunction,
    planned,
    subject_with,
    with_function,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tune_models import (
    MACHINES,
    PER_NODE,
    WORLD,
    by_block,
    columns,
    found_in,
    net,
    setting,
    sizes_of,
)
from tune_truth import captured, compare, described, ran

from graphshard.compiler.partition import cut_in_two
from graphshard.cost.comm import Collective, CollectiveKind, RankGroup
from graphshard.cost.machine import collective_us, work_us
from graphshard.demo.llama import Config, Llama
from graphshard.graph.program import compute_nodes
from graphshard.offline.capture import capture
from graphshard.offline.repeats import CAPTURED, signature
from graphshard.offline.world import faked, pretended
from graphshard.pricing.flops import graph_work
from graphshard.schedule.setting import (
    Decision,
    Grouping,
    MeshShape,
    NoTensor,
    Resharding,
    TensorObstacle,
)
from graphshard.tune.code import code_of
from graphshard.tune.layout import shapes_for
from graphshard.tune.pricing import Pricer
from graphshard.tune.search import Accumulated, Asked, _reverted, batches_for
from graphshard.tune.tensor_parallel import WORDS, plan_of

BATCH, SEQ = 1, 32
BY_HAND = {"blocks.*.up": ColwiseParallel()}


@pytest.fixture(scope="module")
def in_words():
    return subject_with()


WITH_TENSOR = MeshShape(1, WORLD // 2, 2)


# -- what is searched ----------------------------------------------------------------------------


def test_degrees_are_those_of_a_node_and_meshes_of_whole_nodes(in_words):
    assert in_words.degrees(WORLD) == (1, 2)
    assert in_words.degrees(2) == (1,)
    assert list(shapes_for(16, 4, 2)) == [
        MeshShape(1, 8, 2), MeshShape(4, 2, 2), MeshShape(2, 4, 2),
    ]  # fmt: skip
    # A replica of one node would have no shards.
    assert list(shapes_for(16, 4, 4)) == [MeshShape(1, 4, 4), MeshShape(2, 2, 4)]


def test_a_model_that_is_not_cut_over_all_ranks_has_no_degrees():
    def over_half(model):
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
        by_block(model, mesh=mesh, shard_placement_fn=columns)

    def make():
        model = net(dim=24)
        model.tp_plan = IN_WORDS
        return model

    subject = subject_with(make, over_half)
    assert subject.degrees(WORLD) == (1,)
    (left_out,) = subject.tensor.left_out
    assert (left_out.why, left_out.degrees) == (TensorObstacle.CAPTURE, (2,))


def test_a_group_shares_its_sequences(in_words):
    asked = Asked(2**33, (sizes_of(1),), WORLD * 32)
    assert next(batches_for(in_words, WORLD, asked)) == Accumulated(sizes_of(1), 1)
    assert next(batches_for(in_words, WORLD, asked, 2)) == Accumulated(sizes_of(1), 2)
    pricer = Pricer(in_words)
    one, two = (setting(mesh=mesh) for mesh in (MeshShape(1, WORLD), WITH_TENSOR))
    assert pricer.tokens_per_s(one, 1e6) == 2 * pricer.tokens_per_s(two, 1e6) == WORLD * 32


def test_what_is_found_has_both_and_says_what_tensor_parallel_gains(in_words):
    space, found = found_in(in_words)
    assert {shape.tensor for shape in space.shapes} == {1, 2}
    with_tensor = [one for one in space.settings() if one.tensor == 2]
    assert with_tensor
    assert not any(one.reshard is Resharding.NODE for one in with_tensor)
    pricer = Pricer(in_words)
    best = max((pricer.price(one) for one in with_tensor[:3]), key=pricer.rate)
    plain = dict(_reverted(in_words, space, best.setting, None))[Decision.TENSOR].mesh
    assert (plain.tensor, plain.replicas) == (1, best.setting.mesh.replicas)
    assert found.best is not None


SIDE_BY_SIDE = """
from functools import partial

from graphshard.schedule.setting import MeshShape
from graphshard.tune import aside
from graphshard.tune.pricing import Pricer
from tensor_models import planned, subject_with
from tune_models import WORLD, setting

assert aside._may_fork()
forked, forks = aside._forked, []

def found(cores):
    aside._num_cores, aside._may_fork = lambda: cores, lambda: cores > 1
    aside._forked = lambda work: forks.append(work) or forked(work)
    subject = subject_with(partial(planned, depth=2), degrees=(2, 4))
    assert subject.degrees(WORLD) == (1, 2, 4)
    meshes = [MeshShape(1, WORLD // degree, degree) for degree in (1, 2, 4)]
    pricer = Pricer(subject)
    pricer.price_all([setting(mesh=mesh) for mesh in meshes])
    return pricer.tried

alone, beside = found(1), found(2)
assert len(forks) == 1 + 2 and len(alone) == 3
assert alone == beside and all(priced.plan is not None for priced in alone)
"""


def test_what_is_done_in_forks_comes_to_the_same():
    """In a process of its own: where there are other threads there are no forks."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SIDE_BY_SIDE],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- what it costs -------------------------------------------------------------------------------


def collectives_of(subject):
    """Of the model's own, of the captured step, with their times on MACHINES."""
    with pretended(WORLD):
        made = partial(subject.sharded, subject.sizes[0], WITH_TENSOR)
        joint = capture(faked(made), "net").joint_graph
    parts = cut_in_two(joint, recompute=False, fused=False).parts
    machine = replace(MACHINES.machine, ranks_per_node=PER_NODE)
    works = [
        work
        for graph in (parts.placed.forward.graph, parts.placed.backward.graph)
        for work in graph_work(graph)
        if work.collective is not None
    ]
    assert all(work.known and not work.flops for work in works)
    return [(work.collective, work_us(machine, work)) for work in works], parts


def test_collectives_are_those_of_a_count_by_hand(in_words):
    found, parts = collectives_of(in_words)
    # Behind `down` in forward, before `up` in backward.
    one = Collective(CollectiveKind.ALL_REDUCE, (0, 1), BATCH * SEQ * DIM * 4)
    assert [collective for collective, _ in found] == 2 * DEPTH * [one]
    us = collective_us(MACHINES.machine, one.kind, RankGroup(2, 2), one.size_bytes)
    assert {own_us for _, own_us in found} == {us}
    # Waiting for one is no work of its own, and what it yields no memory of its own.
    nodes = compute_nodes(parts.placed.forward.graph)
    waits = [w for n, w in zip(nodes, graph_work(parts.placed.forward.graph), strict=True)
             if "wait_tensor" in n.name]  # fmt: skip
    assert len(waits) == DEPTH
    assert {(w.launches, w.bytes) for w in waits} == {(0, 0)}


def test_a_group_that_is_larger_than_a_node_pays_for_the_network():
    wide = Collective(CollectiveKind.ALL_REDUCE, (0, 4, 8, 12), 2**20)
    assert wide.group(8) == RankGroup(4, 2)
    assert wide.group(4) == RankGroup(4, 1)
    apart = Collective(CollectiveKind.ALL_REDUCE, (0, 1, 16, 17), 2**20)
    assert apart.group(8) == RankGroup(4, 2, node_stride=2)


def test_sequence_parallel_gathers_and_scatters():
    found, _ = collectives_of(subject_with(partial(planned, BY_SEQUENCE)))
    size_bytes = BATCH * SEQ * DIM * 4
    kinds = [c.kind for c, _ in found if c.size_bytes == size_bytes and len(c.ranks) == 2]
    # Before `up` and `head` forward, and behind `down` and the embedding backward; or the reverse.
    assert kinds.count(CollectiveKind.ALL_GATHER) >= 2 * (DEPTH + 1)
    assert kinds.count(CollectiveKind.REDUCE_SCATTER) == 2 * (DEPTH + 1)


@pytest.mark.parametrize(
    "make",
    [partial(planned, depth=CAPTURED + 2), partial(planned, BY_SEQUENCE, CAPTURED + 2)],
    ids=["words", "sequence"],
)
def test_groupings_are_priced_as_if_they_had_been_captured(make):
    subject = subject_with(make)
    assert subject.degrees(WORLD) == (1, 2)
    (repeat,) = subject.repeats
    assert repeat.count - repeat.captured == 2
    for grouping, shape in (
        (Grouping.PAIRS, WITH_TENSOR), (Grouping.AS_IS, MeshShape(2, WORLD // 4, 2))
    ):  # fmt: skip
        wanted = setting(grouping, mesh=shape)
        real_costs = captured(subject, wanted)
        for reshard in (Resharding.OPEN, Resharding.NEVER):
            compare(subject, replace(wanted, reshard=reshard), real_costs)


def test_blocks_with_styles_of_their_own_are_alike():
    """As torchtitan parallelizes them, one by one."""

    def made(sequence_dim):
        model = net(2, dim=DIM)
        for number, block in enumerate(model.blocks):
            own = 1 if number == 0 else sequence_dim
            plan = {
                "norm": SequenceParallel(sequence_dim=own),
                "up": ColwiseParallel(input_layouts=Shard(own)),
                "down": RowwiseParallel(output_layouts=Shard(own)),
                "": PrepareModuleInput(input_layouts=Shard(own), desired_input_layouts=Shard(own)),
            }
            parallelize_module(block, mesh, plan)
        return [signature(block) for block in model.blocks]

    with pretended(WORLD), torch.device("meta"):
        mesh = init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))["tp"]
        first, second = made(1)
        assert first == second
        first, second = made(0)
        assert first != second


# -- plans ---------------------------------------------------------------------------------------


def test_where_plans_are_looked_for():
    with torch.device("meta"):
        assert plan_of(net()) is None
        assert plan_of(planned({})) is None
        assert plan_of(nn.Sequential(planned())).module == "0"
        assert plan_of(with_function()).styles is None
        assert set(plan_of(planned()).styles.values()) <= set(WORDS)


class Uneven(Block):
    def __init__(self, dim):
        super().__init__(dim)
        self.up, self.down = nn.Linear(dim, dim + 1), nn.Linear(dim + 1, dim)


class Fixed(Block):
    """Its forward insists on the whole width."""

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))).unflatten(-1, (3, DIM)).flatten(-2))


class Twice(Block):
    """Two modules with one parameter, of which the plan parallelizes one."""

    def __init__(self, dim):
        super().__init__(dim)
        self.again = nn.Linear(dim, 3 * dim)
        self.again.weight = self.up.weight

    def forward(self, x):
        return super().forward(x) + self.down(torch.relu(self.again(x)))


@pytest.mark.parametrize(
    ("make", "why", "what"),
    [
        (partial(planned, {"blocks.*.up": "wise"}), TensorObstacle.STYLE, "wise"),
        (partial(planned, {"layers.*.up": "colwise"}), TensorObstacle.NAME, "layers.*.up"),
        (partial(planned, block=Uneven), TensorObstacle.UNEVEN, "blocks.0.up.weight"),
        (partial(planned, block=Twice), TensorObstacle.TIED, "blocks.0.again.weight"),
        (partial(planned, block=Fixed), TensorObstacle.CAPTURE, ""),
        (
            partial(planned, {**IN_WORDS, "blocks.7.up": RowwiseParallel()}, CAPTURED + 2),
            TensorObstacle.UNLIKE,
            "blocks",
        ),
        (partial(planned, {"blocks.*": "colwise"}), TensorObstacle.CAPTURE, ""),
    ],
    ids=["style", "name", "uneven", "tied", "fixed heads", "unlike", "no such style of a block"],
)
def test_what_cannot_be_had_is_said_and_the_rest_is_searched(make, why, what):
    subject = subject_with(make)
    assert subject.degrees(WORLD) == (1,)
    is_of_all = why in (TensorObstacle.STYLE, TensorObstacle.NAME)
    assert subject.tensor.left_out == (NoTensor(why, what, () if is_of_all else (2,)),)
    assert subject.kept is None


class SomeBlocks(OwnFunction):
    def tp_plan(self, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.model.blocks[::2]:
            parallelize_module(block, mesh, plan)


def test_a_function_that_parallelizes_some_blocks():
    def make():
        return SomeBlocks(net(CAPTURED + 2, dim=DIM))

    subject = subject_with(make, None)
    assert subject.degrees(WORLD) == (1,)
    reason = NoTensor(TensorObstacle.UNLIKE, "model.blocks", (2,))
    assert subject.tensor.left_out == (reason,)


def test_a_function_is_called_with_a_model_that_it_knows():
    """Its closure is over the model that was built; copies are none of its business."""

    def make():
        model = net(CAPTURED + 2, dim=DIM)
        model.tp_plan = lambda mesh: parallelize_module(
            model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        )
        return model

    subject, other = subject_with(make), subject_with(partial(planned, depth=CAPTURED + 2))
    assert subject.degrees(WORLD) == other.degrees(WORLD) == (1, 2)
    for shape in (WITH_TENSOR, MeshShape(2, WORLD // 4, 2)):
        assert subject.finest(WORLD, shape) == other.finest(WORLD, shape)


def test_degrees_that_fail_alike_are_one():
    subject = subject_with(partial(planned, block=Uneven), degrees=(2, 4))
    subject.degrees(WORLD)
    assert subject.tensor.left_out == (
        NoTensor(TensorObstacle.UNEVEN, "blocks.0.up.weight", (2, 4)),
    )


# -- code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape", "line"),
    [
        (planned, WITH_TENSOR, '"blocks.*.up": ColwiseParallel(),'),
        (
            partial(planned, {**BY_HAND, "blocks.*.down": "rowwise"}),
            MeshShape(2, WORLD // 4, 2),
            '"blocks.*.up": model.tp_plan["blocks.*.up"],',
        ),
        (
            partial(planned, BY_SEQUENCE),
            WITH_TENSOR,
            'parallelize_module(model, whole["tp"], model.tp_plan)',
        ),
        (with_function, WITH_TENSOR, 'model.get_submodule("0").tp_plan(whole["tp"])'),
    ],
    ids=["words", "both", "styles", "function"],
)
def test_the_code_makes_the_groups_and_the_meshes(make, shape, line):
    subject = subject_with(make, None)
    wanted = setting(Grouping.WHOLE, mesh=shape)
    code = code_of(subject, subject.bare(), wanted)
    assert line in code
    found, _ = ran(code, subject, wanted)
    assert found == described(subject, wanted)
    assert {info.world_size for info, _ in found.values()} == {shape.shards}


def test_the_demo_llama_has_a_plan_and_its_mixture_has_none():
    shapes = {"dim": 64, "num_layers": 2, "num_heads": 8, "hidden": 96, "num_kv_heads": 4}
    with torch.device("meta"):
        model = Llama(Config(**shapes, vocabulary=128, recompute="none"), 32)
        assert plan_of(model).module == ""
        assert plan_of(Llama(Config(**shapes, num_experts=4), 32)) is None
