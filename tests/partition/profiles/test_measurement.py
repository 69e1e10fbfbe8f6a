"""What is made of measurements, on clocks that say what they shall."""

import numpy as np
import pytest

pytest.importorskip("torch")

from hpc3d.partition.execution.torch_stage import TorchStage
from hpc3d.partition.profiles.measurement import measured_pieces, measured_run, sizes
from tests.partition.profiles.test_piece_timer import run_of


@pytest.mark.parametrize(("batch", "rows"), [(1, [1]), (8, [1, 2, 4, 8]), (6, [1, 2, 4, 6])])
def test_measured_rows_are_powers_of_two_and_the_batch(batch, rows):
    assert sizes(batch) == rows


def test_piece_times_add_up_to_the_measured_pass():
    """The clock, read before a pass, between and behind, says one second for each direction."""
    run = run_of("chain")
    found = [*measured_pieces(run, [1, 4], 2)]
    assert len(found) == 2
    for seconds in found:
        np.testing.assert_allclose(seconds.sum(1), 1.0)
    forward, _ = found[0]
    assert forward.max() < 0.5 and forward.min() > 0


def test_per_stage_overhead_is_measured(monkeypatch):
    """Three seconds forward and five backward in every part, however many there are."""
    run = run_of("chain")
    now = [0.0]
    run.clock = lambda: now[0]

    def slow(name, seconds):
        method = getattr(TorchStage, name)

        def slower(*arguments):
            now[0] += seconds
            return method(*arguments)

        monkeypatch.setattr(TorchStage, name, slower)

    slow("forward", 3.0)
    slow("backward", 5.0)
    found = measured_run(run, 2)
    assert (found["forward"], found["backward"]) == (3.0, 5.0)


def test_step_overhead_and_update_time_are_measured(monkeypatch):
    """Of 640 bytes of parameters."""
    run = run_of("chain")
    found = measured_run(run, 2)
    step = run.step()
    assert found["step"] == step.rest > 0
    assert found["update"] == step.update / 640 > 0
