"""Signatures: what is in them, their fingerprint, and where two of them part."""

from dataclasses import replace

import pytest
from plans import group, plan, two_layers

from graphshard.schedule import signature
from graphshard.schedule.signature import SignatureEntry


def test_a_kept_gather_is_no_collective():
    rows = [(e.direction, e.kind, e.group) for e in two_layers().collective_signature]
    assert rows == [
        ("forward", "all_gather", "layers.0"),
        ("forward", "all_gather", "layers.1"),
        ("backward", "all_gather", "layers.0"),
        ("backward", "reduce_scatter", "layers.1"),
        ("backward", "reduce_scatter", "layers.0"),
    ]


def test_bytes_and_dtypes_on_the_wire():
    one = replace(group(0, "a", 100), reduce_dtype="float32", reduce_bytes=200)
    made = plan([one], "issue 0, wait 0, compute 1, release 0", "compute 2, reduce 0, reduced 0")
    assert made.collective_signature == (
        SignatureEntry("forward", "all_gather", "a", "float32", 100),
        SignatureEntry("backward", "reduce_scatter", "a", "float32", 200),
    )
    mixed = (*one.params, replace(one.params[0], dtype="bfloat16", gathered_bytes=50))
    made = replace(made, groups=(replace(one, params=mixed),))
    assert made.collective_signature[0] == SignatureEntry(
        "forward", "all_gather", "a", "bytes", 150
    )


def test_merged_groups_are_one_collective():
    made = plan([group(0, "a"), group(1, "b")], "issue 0, wait 0, compute 1, release 0")
    issue, *rest = made.forward.steps
    steps = (replace(issue, with_groups=(1,)), *rest)
    made = replace(made, forward=replace(made.forward, steps=steps))
    assert [(e.group, e.size_bytes) for e in made.collective_signature] == [("a + b", 200)]


def test_replicas_are_reduced_where_a_plan_says_so():
    one = replace(group(0, "a", 100), reduce_dtype="float32", reduce_bytes=200, replicated=True)
    made = plan(
        [one],
        "issue 0, wait 0, compute 1, release 0",
        "compute 2, reduce 0, reduced 0, add 0, added 0",
    )
    shard_bytes = 200 // one.world_size
    assert made.collective_signature[1:] == (
        SignatureEntry("backward", "reduce_scatter", "a", "float32", 200),
        SignatureEntry("backward", "all_reduce", "a", "float32", shard_bytes),
    )


def test_a_fingerprint_knows_collectives_and_nothing_else():
    base = two_layers()
    ops = plan(
        base.groups,
        "issue 0, wait 0, issue 1, compute 40, release 0, wait 1, compute 3, release 1 kept",
        "issue 1 kept, issue 0, wait 1 kept, compute 5, release 1, reduce 1, wait 0, compute 6,"
        "release 0, reduce 0, reduced 1, reduced 0",
        name="another name",
    )
    assert ops.fingerprint == base.fingerprint
    assert len(base.fingerprint) == 64
    wider = replace(base, groups=(group(0, "layers.0", 104), base.groups[1]))
    assert wider.fingerprint != base.fingerprint
    assert base.summary().fingerprint == base.fingerprint


def test_the_fingerprint_stays():
    """Ranks of one job may be started at different times: it depends on the plan alone."""
    assert two_layers().fingerprint.startswith("08efac6571bb13b9")


def test_text_round_trip():
    made = two_layers().collective_signature
    assert signature.from_text(signature.to_text(made)) == made
    with pytest.raises((ValueError, TypeError)):
        signature.from_text("[[1]]")


A, B, C = (SignatureEntry("forward", "all_gather", name, "float32", 1024) for name in "abc")


def test_the_first_difference_names_entry_and_ranks():
    assert signature.difference({0: (A, B), 1: (A, B)}) is None
    text = signature.difference({0: (A, B), 1: (A, C), 2: (A, B)})
    assert text == (
        "collective 1 is ranks 0, 2: forward all_gather of b (float32, 1,024 bytes); "
        "rank 1: forward all_gather of c (float32, 1,024 bytes)"
    )
    assert "rank 1: nothing more" in signature.difference({0: (A, B), 1: (A,)})


def test_what_fsdp2_could_run_together():
    assert signature.same_way({0: (A, B), 1: (A,)}, early={1})  # a graph break on rank 1
    assert not signature.same_way({0: (A, B), 1: (A,)})  # rank 1 leaves out b
    assert not signature.same_way({0: (A,), 1: (A, B)}, early={1})
    assert not signature.same_way({0: (A, B, C), 1: (A, C)})  # a module skipped on rank 1
    together = replace(A, group="a + b", size_bytes=2048)
    assert signature.same_way({0: (A, B), 1: (together,)})  # merged on rank 1


def test_fsdp2_reduces_what_has_a_gradient():
    grads = [SignatureEntry("backward", "reduce_scatter", name, "float32", 512) for name in "ab"]
    some = replace(grads[1], size_bytes=256)  # a parameter that rank 1 does not use
    merged = replace(grads[0], group="a + b", size_bytes=1024)
    assert signature.same_way({0: (A, B, *grads), 1: (A, B, merged)})
    assert not signature.same_way({0: (A, B, *grads), 1: (A, B, grads[0], some)})
    assert not signature.same_way({0: (A, B, *grads), 1: (A, B, grads[0])})
    assert signature.same_way({0: (A, B, *grads), 1: (A, B, grads[0])}, early={1})
    assert signature.same_way({0: (A, B, *grads), 1: (A, B, grads[0], some)}, reduces_unused=True)
