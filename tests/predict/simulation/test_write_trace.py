"""A simulated step as a trace."""

import numpy as np
import pytest

from hpc3d import trace
from hpc3d.analyze.metrics.prediction import prediction_rows
from hpc3d.analyze.metrics.step import time_rows
from hpc3d.predict.simulation import write_trace as write
from hpc3d.predict.simulation.summary import summary
from hpc3d.predict.simulation.write_trace import prediction, write_trace
from hpc3d.trace.annotations import write_prediction
from hpc3d.trace.checks_per_rank import violations
from tests.predict.fixed import MACHINE
from tests.predict.simulation.test_simulator import ASYNCHRONOUS, PIPELINES, simulated
from tests.strided import strided


@pytest.mark.parametrize("line", strided(PIPELINES[len(ASYNCHRONOUS) :: 5], 6))
def test_simulated_trace_is_consistent(line, tmp_path):
    config, runs = simulated(line)
    path = write_trace(tmp_path, runs, config, MACHINE)
    assert [*tmp_path.iterdir()] == [path]
    found = summary(runs, config, MACHINE)
    write_prediction(path, prediction(runs, found))
    with trace.open(path) as opened:
        assert opened.attrs["kind"] == "simulated" and opened.attrs["complete"]
        assert violations(opened) == []
        assert len(opened.ranks) == len(np.unique(opened.events["rank"])) == found["ranks"]
        assert opened.prediction["value"][0] == found["step_time_s"]
        peaks = [row for row in prediction_rows(opened) if row["quantity"] == "peak_all_bytes"]
        assert [row["ratio"] for row in peaks] == [1.0] * config.mesh.p
        shares = [row["share"] for row in time_rows(opened)]
        assert sum(shares) == pytest.approx(1, abs=1e-9)


def test_overlapping_steps_cannot_be_written_as_a_trace(tmp_path):
    config, runs = simulated(ASYNCHRONOUS[0])
    with pytest.raises(ValueError, match="training steps overlap"):
        write_trace(tmp_path, runs, config, MACHINE)


def test_trace_with_too_many_rows_is_rejected(tmp_path, monkeypatch):
    config, runs = simulated("p=2 schedule=gpipe microbatches=4")
    copies = [run._replace(events=runs[0].events) for run in runs]
    monkeypatch.setattr(write, "MOST_ROWS", 2 * len(runs[0].rows) - 1)
    with pytest.raises(ValueError, match="remove --out"):
        write_trace(tmp_path, copies, config, MACHINE)
