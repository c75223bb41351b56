"""All ranks begin to run a root together, or leave it to FSDP2 together."""

from __future__ import annotations

from graphshard.capture.fallback.causes import describe, warn_once
from graphshard.capture.root_state import RootState
from graphshard.errors import DivergedRanks
from graphshard.options import Options
from graphshard.runtime.agree import leave
from graphshard.runtime.aside import stand_aside
from graphshard.runtime.roll import call_roll
from graphshard.runtime.votes import FSDP2_RUNS


def open_roots(root_states: list[RootState], options: Options) -> None:
    """All ranks begin to run these roots together.

    Raises DivergedRanks on all of them if they differ in what eager FSDP2 does not bear either.
    """
    ballots = [ballot for root_state in root_states for ballot in root_state.ballots]
    if options.verify == "off":
        stand_aside(ballots, options.terms(), wait_s=0.0)
        return
    try:
        call_roll(ballots, options.terms())
    except DivergedRanks as error:
        part_ways(root_states, error, options)


def part_ways(root_states: list[RootState], error: DivergedRanks, options: Options) -> None:
    """All groups of these roots go to FSDP2, on every rank.

    Raises `error` where FSDP2 would fail as well.
    """
    if options.fallback == "error" or error.code not in FSDP2_RUNS:
        raise error
    why = describe(error)
    for root_state in root_states:
        for live in root_state.groups:
            root_state.leave_eager(live.fqn, why)
        leave(root_state.ballots, why)
        for ballot in root_state.ballots:
            ballot.is_open = True
    warn_once(f"the whole model runs through eager FSDP2: {why}")
