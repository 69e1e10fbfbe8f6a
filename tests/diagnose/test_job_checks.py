"""Names of ranks in findings about a job."""

import pytest

from hpc3d.diagnose.meeting import numbers
from hpc3d.runtime.host_map import spans


@pytest.mark.parametrize("ranks", [[], [0], [3, 4, 5], [0, 2, 3, 9, 10, 11, 40]])
def test_rank_spans_round_trip(ranks):
    assert numbers(f"ranks {spans(ranks)}") == ranks
