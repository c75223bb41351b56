"""What calibration would have measured, in numbers that are easy to count with."""

from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.curve import Curve, Fit, Sample, SizeClass, line
from graphshard.cost.profile import CommFit, CostProfile, Origin

INF = float("inf")
GATHER = Fit(
    Curve(100.0, (SizeClass(4096.0, 0.001), SizeClass(INF, 0.002))),
    (Sample(4096.0, 110.0), Sample(8192.0, 112.296)),
)
PROFILE = CostProfile(
    Origin("cpu (x86_64)", "node1", 2, 1, 2, "gloo", "2.13.0", "2026-01-01T00:00:00+00:00", "run"),
    (CommFit(CollectiveKind.ALL_GATHER, RankGroup(2, 2, "world"), GATHER),),
    (("float32", Fit(line(2.0, 50_000.0), (Sample(1e6, 22.0), Sample(2e6, 42.0)))),),
    (("float32", Fit(line(3.0, 10_000.0), (Sample(1e6, 103.0), Sample(2e6, 203.0)))),),
    Fit(line(1.0, 20_000.0), (Sample(1e4, 1.5), Sample(1e6, 51.0))),
)
