"""Wait and transfer times of each axis."""

import numpy as np
import pytest

from hpc3d import trace
from hpc3d.analyze.metrics.wait_states import calls_of, wait_rows
from hpc3d.predict.simulation.write_trace import write_trace
from hpc3d.studies.pp_vs_dp.experiment import resolved_config, step
from hpc3d.studies.pp_vs_dp.wait_times import by_axis, waiting
from tests.predict.fixed import MACHINE


def test_wait_and_transfer_match_the_trace_of_all_ranks(tmp_path):
    parallel = {"microbatches": 4, "layers_per_stage": (5, 2, 1), "scheme": "1d"}
    mesh = {"p": 3, "d": 2, "x": 2}
    config = resolved_config(MACHINE, mesh, 16, parallel, hidden=128, layers=8, sequence=16)
    runs, _ = step(MACHINE, config)
    found = by_axis(runs)
    with trace.open(write_trace(tmp_path, runs, config, MACHINE)) as opened:
        rows = wait_rows(calls_of(opened), ("axis",))
    assert {row["axis"] for row in rows} == {*found} == {"p", "d", "x", "world"}
    for row in rows:
        wait, transfer = found[row["axis"]]
        assert wait == pytest.approx(row["wait_s"], abs=1e-12)
        assert transfer == pytest.approx(row["transfer_s"], abs=1e-12)
    assert found["p"][0] > found["p"][1] > 0


@pytest.mark.slow
def test_uneven_stages_wait_longer_and_transfer_the_same():
    rows = waiting(MACHINE, 128, 8)
    assert [row["imbalance"] for row in rows] == [0, 0.25, 0.5, 1, 1.5]
    waits = [sum(row["wait_s"].values()) for row in rows]
    assert np.all(np.diff(waits) > 0) and waits[-1] > 2 * waits[0]
    assert {row["wait_s"]["x"] for row in rows} == {0}
    transfers = [row["transfer_s"]["x"] for row in rows]
    assert transfers == pytest.approx([transfers[0]] * len(rows), rel=1e-6)
