"""The runs that calibrate a machine."""

from dataclasses import replace

import pytest

from hpc3d.predict.calibration.calibrate import step_seconds
from hpc3d.predict.calibration.calibration_runs import CALIBRATE, CHECK, config_of, settings
from hpc3d.predict.simulation.simulator import simulate
from tests.predict.calibration.test_calibrate import KNOWN


def test_calibration_runs_use_one_to_eight_ranks():
    ranks = [settings(line)[0] for line in (*CALIBRATE, *CHECK)]
    assert {*ranks} == {1, 2, 4, 8}
    assert len(CHECK) == 12
    assert not {config_of(line) for line in CHECK} & {config_of(line) for line in CALIBRATE}


def test_ranks_that_share_cores_are_slower():
    """The time of ranks that only compute is proportional to the ranks per core; others can
    compute during a pipeline's bubble."""
    config = config_of("p=4 layers=4 hidden=96 batch=8 microbatches=4 schedule=gpipe")
    alone = simulate(config, 256, replace(KNOWN, cores=4))
    shared = simulate(config, 256, replace(KNOWN, cores=2))
    work = sum(each.busy for each in alone) / 2e9
    assert step_seconds(alone) < work < 2 * step_seconds(alone)
    assert step_seconds(shared) == pytest.approx(work, rel=1e-3)
    config = config_of("x=2 y=2 hidden=96 batch=8")
    alone, shared = (step_seconds(simulate(config, 256, replace(KNOWN, cores=n))) for n in (4, 2))
    assert shared == pytest.approx(2 * alone, rel=1e-3)
