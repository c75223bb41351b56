"""What the planner is told of the emulated machine: a profile as `graphshard calibrate` writes.

    python -m bench.profile OUT.json

measures this machine's compute, on the emulated network's own clock (CPU time of one thread). The
network needs no measurement: `with_network` adds the emulator's exact curves.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench import emulator
from graphshard.cost.calibrate import calibrate
from graphshard.cost.comm import Collective, Group
from graphshard.cost.curve import Fit, Sample, curve_us, line
from graphshard.cost.profile import CommFit, Profile, read_profile

AMOUNTS = (1e4, 1e6)  # bytes; two samples are what a profile needs of a line


def with_network(profile: Profile, *, num_ranks: int, gbit: float, alpha_us: float) -> Profile:
    curve = line(alpha_us, gbit * emulator.BYTES_PER_US_OF_ONE_GBIT)
    samples = tuple(Sample(amount, float(curve_us(curve, amount))) for amount in AMOUNTS)
    group = Group(num_ranks, num_ranks, emulator.BACKEND)
    comm = tuple(CommFit(kind, group, Fit(curve, samples)) for kind in Collective)
    return replace(profile, comm=comm)


def write(folder: Path, compute: Path, *, num_ranks: int, gbit: float, alpha_us: float) -> Path:
    """A profile of one rate of the link, with the compute that was measured into `compute`."""
    profile = with_network(read_profile(compute), num_ranks=num_ranks, gbit=gbit, alpha_us=alpha_us)
    path = folder / f"{gbit:g}_gbit.json"
    path.write_text(profile.to_json())
    return path


def main() -> None:
    torch.set_num_threads(1)
    emulator.join(1, gbit=1.0, alpha_us=0.0)
    command = "python -m bench.profile"
    Path(sys.argv[1]).write_text(calibrate({}, torch.device("cpu"), command=command).to_json())


if __name__ == "__main__":
    main()
