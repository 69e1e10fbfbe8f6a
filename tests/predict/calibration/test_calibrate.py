"""Calibration recovers a known machine from traces, and rejects unsuitable traces."""

from dataclasses import replace

import pytest

import hpc3d.trace
from hpc3d.pipeline.program import program_of
from hpc3d.predict.calibration.align_trace import works
from hpc3d.predict.calibration.calibrate import machine_of, step_seconds, with_wakeup
from hpc3d.predict.calibration.calibration_runs import config_of
from hpc3d.predict.machine.machine import Link, Machine, Rates
from hpc3d.predict.machine.machine_file import dumps, load
from hpc3d.predict.simulation.simulated_clock import HostDrivenClock
from hpc3d.predict.simulation.simulator import run, simulate
from hpc3d.predict.simulation.stage_turns import StageTurns
from hpc3d.predict.simulation.write_trace import write_trace

FACTS = {"name": "known", "source": "a test", "ranks_per_node": 8, "cores": 8, "memory_gb": 1.0}
KNOWN = Machine(
    memory_bandwidth=5e9,
    launch_s=4e-6,
    gemm={"float32": Rates(9e10, (1e4, 1e6, 1e8), (1e9, 2e10, 9e10))},
    links=(Link(0, 3e-5, 2e9),),
    kernels={"add": 3e9, "gelu_tanh": 1e9, "adamw": 8e8, "attend": 6e8},
    **FACTS,
)
RUNS = (
    "x=1 hidden=96 batch=8",
    "x=1 hidden=192 batch=16",
    "x=2 y=2 z=2 hidden=96 batch=8",
    "x=2 y=2 z=2 hidden=192 batch=8",
    "p=2 d=2 hidden=96 batch=8 microbatches=4",
)
OTHERS = ("x=2 y=2 hidden=144 batch=8", "p=2 z=2 hidden=144 batch=12 microbatches=3")


class Worked(HostDrivenClock):
    """Clock of a core, which stops while its rank waits.

    Reading it takes a nanosecond, so no two rows end at the same time, as on a real machine.
    """

    @property
    def now(self):
        self.busy += 1
        return self.busy

    @now.setter
    def now(self, time):
        pass


def traced(folder, line, clock="cpu", said=None):
    """Return the trace of a simulated run on the known machine, stored as the run of `said`."""
    config = config_of(line, clock=clock)
    program = program_of(config)
    stages = StageTurns(config.mesh.p)
    runs = stages.run(lambda peers: run(peers, config, 256, program, Worked(KNOWN)))
    folder.mkdir()
    return hpc3d.trace.open(write_trace(folder, runs, config_of(said or line, clock=clock), KNOWN))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder, computed = tmp_path_factory.mktemp("known"), []
    for number, line in enumerate(RUNS):
        with traced(folder / str(number), line) as trace:
            computed += works(trace, skip=0)
    return machine_of(computed, **FACTS)


@pytest.mark.slow
def test_product_rates_are_recovered(found):
    rates = found.gemm["float32"]
    assert len(rates.flop) > 5
    assert rates.rate == pytest.approx([*map(KNOWN.gemm["float32"].curve, rates.flop)], rel=0.01)


@pytest.mark.slow
def test_kernel_rates_are_recovered(found):
    assert found.launch_s == pytest.approx(KNOWN.launch_s, rel=0.2)
    assert {*KNOWN.kernels} < {*found.kernels}
    for name in ("add", "gelu_tanh", "adamw", "attend", "normalise", "moments"):
        rate = KNOWN.kernels.get(name, KNOWN.memory_bandwidth)
        assert found.kernels[name] == pytest.approx(rate, rel=0.05), name


@pytest.mark.slow
def test_call_times_are_recovered(found):
    calls = {(table.op, table.members): table for table in found.measured}
    assert {("all_gather", 2), ("reduce_scatter", 2), ("send", 2), ("recv", 2)} < {*calls}
    assert {("all_reduce", 2), ("all_reduce", 4), ("all_reduce", 8)} < {*calls}
    for (op, members), table in calls.items():
        known = [KNOWN.call(op, nbytes, range(members)) for nbytes in table.bytes]
        assert table.seconds == pytest.approx(known, rel=0.05), (op, members)


@pytest.mark.slow
@pytest.mark.parametrize("line", OTHERS)
def test_calibrated_machine_predicts_other_runs(found, line):
    config = config_of(line)
    known, ours = (step_seconds(simulate(config, 256, each)) for each in (KNOWN, found))
    assert ours == pytest.approx(known, rel=0.02)


@pytest.mark.slow
def test_wakeup_time_is_fitted_to_the_unexplained_step_time(found):
    config = config_of(OTHERS[0])
    slow = step_seconds(simulate(config, 256, replace(found, wakeup_s=3e-4)))
    assert with_wakeup(found, [(config, slow)]).wakeup_s == pytest.approx(3e-4, rel=0.01)
    assert with_wakeup(found, [(config, 0.0)]).wakeup_s == 0.0


@pytest.mark.slow
def test_calibrated_machine_file_round_trips(found, tmp_path):
    (tmp_path / "found.toml").write_text(dumps(found))
    assert load(tmp_path / "found.toml") == found


def test_wall_clock_traces_are_rejected(tmp_path):
    refused = pytest.raises(ValueError, match=r"record it with --trace[.]clock cpu")
    with traced(tmp_path / "run", RUNS[0], clock="wall") as trace, refused:
        works(trace)
