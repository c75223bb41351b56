"""Recorded facts of runs, as the doctor compares them: two ranks, two groups, two steps."""

from dataclasses import replace

from graphshard.doctor.examine import judge
from graphshard.doctor.facts import Facts, GradientFacts, GroupFacts, StepFacts
from graphshard.doctor.launch import LaunchedRun

MIB = 2**20


def group(name, *, kind="Block", size=4 * MIB, in_graph=True, **changes):
    made = GroupFacts(name, kind, size // 4, size, 2, "float32", ran=True, in_graph=in_graph)
    return replace(made, **changes)


def gradient(name, *norms):
    digests = tuple(norm if norm is None else hash(norm) for norm in norms)
    return GradientFacts(name, norms, tuple(norm and 0.5 * norm for norm in norms), digests)


def step(loss=2.0, **norms):
    gradients = norms or {"a": (1.0, 2.0), "b": (3.0,)}
    found = tuple(gradient(name, *values) for name, values in gradients.items())
    return StepFacts((loss,), found, 5, 3, 0, 1000.0)


def facts(rank=0, mode="eager", **changes):
    steps = changes.pop("steps", (step(), step(1.9)))
    made = Facts(
        mode, rank, 2, "host", "cpu", "", 4 * MIB, (group("a"), group("b")), (), steps, MIB // 4
    )
    return replace(made, **changes)


def ranks(mode="eager", **changes):
    return tuple(facts(rank, mode, **changes) for rank in range(2))


def codes(findings):
    return [finding.code for finding in findings]


def only(findings):
    (found,) = findings
    return found


def changed(place, **norms):
    """Both ranks, where the gradients of one step are others."""
    steps = [step(), step(1.9)]
    given = {"a": (1.0, 2.0), "b": (3.0,), **norms}
    steps[place] = step(steps[place].losses[0], **given)
    return ranks("graphshard", steps=tuple(steps))


def run(found, status=0, steps_wanted=2, tail=()):
    return LaunchedRun(
        found[0].mode if found else "eager", tuple(found), status, steps_wanted, tail
    )


def examined(*runs, **settings):
    """The examination, and the modes in which the command was run."""
    left, modes = list(runs), []

    def launch(mode):
        modes.append(mode)
        return left.pop(0)

    return judge(("train.py",), launch, **settings), modes


def as_aot(found, graphs=1):
    return tuple(replace(rank, mode="aot_eager", aot_graphs=graphs) for rank in found)
