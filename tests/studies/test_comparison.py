"""A pipeline, compared with data parallelism."""

import pytest

from hpc3d.predict.simulation.simulator import BYTE_VOCABULARY
from hpc3d.studies.pp_vs_dp.comparison import slowed, why
from tests.predict.fixed import MACHINE
from tests.studies.small import APART, FLOAT, LAYERS, RANKS, SEQUENCE, small


@pytest.mark.parametrize(("batch", "less"), [(72, "pipeline"), (136, "pipeline"), (296, "data")])
def test_pipeline_and_data_parallel_bytes_match_closed_forms(batch, less):
    hidden, tokens = 64, batch * SEQUENCE
    row = small(MACHINE, hidden, batch, 4)
    layer = 12 * hidden**2 + 13 * hidden
    parameters = (
        LAYERS * layer + (BYTE_VOCABULARY + SEQUENCE + 2) * hidden
    )  # both norms and tables
    assert row["pipeline_bytes"] == 2 * tokens * hidden * FLOAT
    assert row["data_bytes"] == 2 * (RANKS - 1) * parameters * FLOAT // RANKS
    assert row["boundary"] == 12 * LAYERS * hidden * (RANKS - 1) / RANKS == 2304
    assert (less == "pipeline") == (tokens < row["boundary"])
    assert row["moves_less"] == less


def test_pipeline_wins_for_wide_models_slow_networks_and_few_tokens():
    slow = slowed(APART, 64)
    row = small(slow, 256, 16, 4)
    assert (row["moves_less"], row["wins"], row["why"]) == ("pipeline", "pipeline", "")
    assert row["pipeline_s"] < 0.1 * row["data_s"]
    assert row["pipeline_memory"] < row["data_memory"] / 2
    wide, narrow, many = (
        each["pipeline_s"] / each["data_s"]
        for each in (row, small(slow, 64, 16, 4), small(slow, 64, 256, 4))
    )
    assert wide < narrow < 1 < many


def test_data_parallelism_beats_a_pipeline_with_one_microbatch():
    one, four = (small(MACHINE, 512, 16, count) for count in (1, 4))
    assert one["data_s"] == four["data_s"]
    assert (one["moves_less"], one["wins"], one["why"]) == ("pipeline", "data", "bubble")
    assert four["wins"] == "pipeline"


def test_main_cost_of_a_losing_pipeline_is_named():
    row = {"moves_less": "pipeline", "wins": "data", "pipeline_s": 2.0, "data_s": 1.0}
    shares = {"ideal_bubble": 0.2, "pipeline_exposed": 0.6}
    assert why(row | shares) == "messages"
    assert why(row | shares | {"ideal_bubble": 0.5}) == "bubble"
    assert why(row | shares | {"pipeline_exposed": 0.22}) == "passes"
    assert why(row | shares | {"moves_less": "data"}) == ""
    assert why(row | shares | {"moves_less": "data", "wins": "pipeline"}) == "sums"


def test_slowed_machine_is_slower_only_between_nodes():
    slow, far, near = slowed(MACHINE, 4), (0, 8), (0, 1)
    assert slow.call("send", 1e6, near) == MACHINE.call("send", 1e6, near)
    moved = MACHINE.call("send", 1e6, far) - MACHINE.call("send", 0, far)
    assert slow.call("send", 1e6, far) - slow.call("send", 0, far) == pytest.approx(4 * moved)
