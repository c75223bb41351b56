"""What building a model allocates is counted, though alike ops are looked at once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.offline.unfilled import Unfilled

SIZES = st.integers(1, 4)
MADE = st.one_of(
    st.builds(lambda n: lambda: torch.zeros(n), SIZES),
    st.builds(lambda n: lambda: torch.arange(n), SIZES),
    st.builds(lambda n: lambda: torch.arange(n, 2 * n), SIZES),
    st.builds(lambda n: lambda: torch.ones(n, dtype=torch.float64), SIZES),
    st.builds(lambda n, m: lambda: torch.ones(n, 1).expand(n, m).clone(), SIZES, SIZES),
    st.builds(lambda n, m: lambda: torch.cat([torch.ones(n), torch.ones(m)]), SIZES, SIZES),
    st.builds(lambda n, m: lambda: torch.ones(n).repeat(m), SIZES, SIZES),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(making=st.lists(MADE, min_size=1, max_size=6))
def test_alike_ops_are_counted_each_time(making):
    """As if each were looked at for the first time."""
    with Unfilled() as whole:
        for make in making:
            make()
    counted = 0
    for make in making:
        with Unfilled() as alone:
            make()
        counted += alone._made_bytes
    assert whole._made_bytes == counted > 0
