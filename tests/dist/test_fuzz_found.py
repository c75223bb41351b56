"""Differences from eager FSDP2 that the fuzzer found, reduced; each was mended.

A new one is the repr of a failing case of `test_fuzz.py`.
"""

import pytest
from fuzz_cases import (
    TWO_HEADS,
    Forward,
    Freeze,
    FuzzCase,
    Group,
    Part,
    Set,
    Step,
    Tree,
    Unshard,
    has,
)
from fuzz_run import EQUAL, run_case
from pool import Pool, capped

pytestmark = pytest.mark.dist

FANS_OUT = Tree(Part("sequence", (Part("linear"), Part("residual", (Part("rms"),)))))
CONV_AND_MLP = Part("branches", (Part("conv"), Part("mlp", hidden=7)))
ONE_OF_TWO = Part("choice", (CONV_AND_MLP, Part("branches", (Part("dropout"),))))
LINEARS = Tree(Part("sequence", (Part("linear"), Part("linear"))))
FOUND = {
    # One rank compiled anew for its lengths, and waited for a reduction that the other put off to
    # its next graph.
    "one-rank-recompiles-between-two-graphs-of-replicas": FuzzCase(
        Tree(
            Part(
                "sequence",
                (Part("norm"), Part("centred"), Part("wrapper", (Part("mlp"),)), Part("break")),
            ),
            width=3,
            heads=(4, 1),
            named=True,
        ),
        (
            Group(("heads.1",)),
            Group(("body.2",)),
            Group(("body.1",), reshard=False),
            Group(("body.0",)),
            Group(("body",)),
        ),
        (Step(rows=3, length=4, ragged=True, sync="always"), Step(rows=3, length=4)),
        compile="apart",
        mesh="2x1",
    ),
    # Costs made another order of waits, and so of all-reduces, on each rank; rank 1 knew its order
    # from the graph of the evaluations, and asked nobody.
    "ragged-batches-of-replicas-after-an-evaluation": FuzzCase(
        Tree(
            Part("sequence", (ONE_OF_TWO, Part("tied"), Part("twice", (Part("conv"),)))),
            heads=(3,),
            extra=True,
            own=True,
        ),
        (Group(("heads.0",)), Group(("body.1",), reshard=False), Group(("",))),
        (
            Forward("eval"),
            Unshard(1, False),
            Forward("eval"),
            Step(length=2, ragged=True, sync="always", zero="keep"),
            Forward("eval"),
            Step(length=2, sync="always"),
        ),
        mesh="1x2",
    ),
    # matmul folds a transposed input only where the weight requires grad, under no_grad too.
    "matmul-under-no-grad": FuzzCase(
        Tree(Part("sequence", (Part("conv"),)), heads=(4,)),
        (Group(("",)),),
        (Step(), Forward("no_grad"), Forward("inference")),
    ),
    # AOTAutograd refused retain_graph once the backward was compiled.
    "retain-graph-after-an-ordinary-backward": FuzzCase(
        LINEARS, (Group(("",)),), (Step(), Step(backwards=2))
    ),
    # With symbolic sizes it is compiled before the first backward.
    "retain-graph-with-symbolic-sizes": FuzzCase(
        LINEARS, (Group(("",)),), (Forward("eval"), Step(rows=5, backwards=2))
    ),
    # FSDP2 made memory under inference_mode, and raised.
    "unshard-waited-for-under-inference-mode": FuzzCase(
        LINEARS,
        (Group(("body.0",)), Group(("",))),
        (Step(), Unshard(wait=False), Forward("inference"), Step(), Step(eager=True)),
    ),
    # FSDP2 itself had gathered nothing before, and made what training cannot use.
    "eager-inference-after-compiled-training": FuzzCase(
        LINEARS,
        (Group(("body.0",)), Group(("",), columns=True)),
        (Step(), Forward("inference", eager=True), Step(eager=True), Step()),
    ),
    # torch has no such graph: checkpoint and random numbers, and nothing that requires grad.
    "checkpointed-dropout-without-a-group": FuzzCase(
        Tree(Part("sequence", (Part("wrapper", (Part("dropout"),)), Part("linear")))),
        (Group(("body.0",)), Group(("body.1",))),
        (Step(),),
        compile="each",
    ),
    # What FSDP2 had gathered of shards along dim 1 was taken over in the wrong order.
    "unshard-of-columns": FuzzCase(
        Tree(Part("sequence", (Part("linear"),)), width=8),
        (Group(("",), columns=True),),
        (Unshard(0, True), Forward("no_grad"), Unshard(0, False), Step(), Unshard(0), Step()),
    ),
    # A list has an accumulation boundary where its first module begins; a state without
    # parameters has none.
    "a-list-whose-second-module-adds-up-gradients": FuzzCase(
        FANS_OUT, (Group(("body.0", "body.1.inner")), Group(("",))), (Step(),)
    ),
    "a-list-in-half-precision": FuzzCase(
        FANS_OUT,
        (Group(("body.0", "body.1.inner"), precision="bf16-out-fp32"), Group(("",))),
        (Step(),),
    ),
    "a-module-without-parameters-of-its-own": FuzzCase(
        FANS_OUT,
        (Group(("body.1.inner",)), Group(("body.0",)), Group(("",))),
        (Step(),),
        ignored=("body.1",),
    ),
    # Ranks run different graphs side by side, of which one reduced two heads in another order.
    "ragged-rows-after-another-length": FuzzCase(
        TWO_HEADS,
        (Group(("heads.1",)), Group(("heads.0",), reshard=False), Group(("body",)), Group(("",))),
        (Step(zero="keep"), Forward("train", rows=3), Step(rows=1, ragged=True)),
    ),
    # An optimizer in backward changes what FSDP2 keeps gathered for the next micro-step.
    "optimizer-in-backward-and-kept-after-backward": FuzzCase(
        LINEARS,
        (Group(("",)),),
        (Step(), Set("reshard_after_backward", False, 0), Step(), Step(micro_steps=2)),
        optimizer="in-backward",
    ),
    # FSDP2 keeps the root gathered although no backward will come (a declared difference).
    "nothing-requires-grad": FuzzCase(
        LINEARS, (Group(("body.0",)), Group(("",))), (Freeze("", False), Step(), Step())
    ),
    # Backward needs no parameter of the first layer.
    "kept-after-a-backward-that-does-not-need-it": FuzzCase(
        LINEARS,
        (Group(("body.0",)), Group(("",))),
        (Set("reshard_after_backward", False), Step(optimize=False), Step()),
    ),
    # Eager FSDP2 leaves such a list gathered and in forward; the next backward ends that.
    "a-list-of-modules-that-no-module-holds": FuzzCase(
        Tree(LINEARS.body, heads=(4,)),
        (Group(("body.1", "heads.0")), Group(("body.0",)), Group(("body",))),
        (Step(), Forward("no_grad", eager=True), Step()),
    ),
    # Of a list the first module runs outside of the graphs, the second in one, whose backward came
    # in the middle of FSDP2's own.
    "a-list-on-both-sides-of-a-graph-break": FuzzCase(
        Tree(Part("sequence", (Part("break"), Part("linear"), Part("linear"))), heads=(4,)),
        (Group(("body.2", "heads.0")), Group(("",))),
        (Step(), Step(micro_steps=2)),
    ),
    # A backward reshards what the user unsharded and nobody used.
    "unshard-of-what-is-not-used": FuzzCase(
        Tree(Part("sequence", (Part("choice", (Part("dropout"), Part("linear"))), Part("linear")))),
        (Group(("body.0.ways.b",)), Group(("",))),
        (Unshard(), Step(), Unshard(), Step()),
    ),
}


@pytest.mark.skipif(capped(2) < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("name", FOUND)
def test_found(pool: Pool, name: str) -> None:
    for outcome in pool.run(FOUND[name].ranks, run_case, FOUND[name]):
        assert outcome.verdict == EQUAL, outcome.why
        breaks = has(FOUND[name].tree, "break")
        assert 0 < outcome.in_graph <= outcome.calls
        assert breaks or outcome.in_graph == outcome.calls
