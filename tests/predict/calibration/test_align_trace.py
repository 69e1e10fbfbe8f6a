"""Calls of a trace, matched with predicted calls."""

import pytest

import hpc3d.trace
from hpc3d.predict.calibration.align_trace import works
from hpc3d.predict.calibration.calibrate import machine_of
from hpc3d.trace.schema import CATEGORY
from tests.predict.calibration.test_calibrate import FACTS, RUNS, traced
from tests.runs import train


@pytest.mark.parametrize("other", ["layers=3", "batch=16", "zero=1 d=2 y=1", "hidden=192"])
def test_trace_of_another_configuration_is_rejected(tmp_path, other):
    line = "y=2 hidden=96 batch=8"
    refused = pytest.raises(ValueError, match="differ from the events that")
    with traced(tmp_path / "run", line, said=f"{line} {other}") as trace, refused:
        works(trace, skip=0)


def test_trace_with_too_few_steps_is_rejected(tmp_path):
    refused = pytest.raises(ValueError, match=r"repeat the run .* for more than two steps")
    with traced(tmp_path / "run", RUNS[0]) as trace, refused:
        works(trace)


@pytest.mark.slow
def test_real_trace_is_aligned_and_all_its_time_is_attributed(tmp_path):
    """p=2 has messages, and d=2 has reductions that are waited for later. A step consists of its
    rows, the time between them, and the reading of data."""
    mesh = {"mesh__p": 2, "mesh__d": 2, "mesh__x": 1, "mesh__y": 1, "mesh__z": 1}
    sizes = {"parallel__microbatches": 2, "train__steps": 3, "model__dropout": 0.1}
    mesh["mesh__transport"] = "mpi"
    folder = train(4, tmp_path, trace__clock="cpu", train__dtype="float32", **mesh, **sizes)
    with hpc3d.trace.open(folder) as trace:
        computed = works(trace)
        last, io = trace.steps["step"] == 2, trace.events["category"] == CATEGORY.index("io")
        steps = trace.steps["t_end"][last].sum() - trace.steps["t_start"][last].sum()
        read = trace.events["dur"][io & (trace.events["step"] == 2)].sum()
    assert sum(work.seconds for work in computed) * 1e9 == pytest.approx(steps - read, abs=1e3)
    assert {work.call.op for work in computed if work.call} >= {"send", "recv", "all_reduce"}
    assert min(work.seconds for work in computed) >= 0
    assert {table.members for table in machine_of(computed, **FACTS).measured} == {2, 4}
