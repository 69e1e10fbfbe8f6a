"""The location of a run's trace."""

import pytest

import hpc3d.trace
from hpc3d.analyze.metrics.columns import require_steps
from hpc3d.trace.locate import trace_of
from hpc3d.training.run_folder import set_aside
from tests.trace.test_previous_attempts import attempt


@pytest.mark.parametrize("settings", [b"", b"\xff\xfe", b"[trace"])
def test_a_run_without_a_trace_is_named_whatever_its_settings(tmp_path, settings):
    (tmp_path / "config.toml").write_bytes(settings)
    with pytest.raises(ValueError, match=f"{tmp_path}: no trace yet"):
        trace_of(tmp_path)


def test_runs_of_a_study_are_suggested(tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    with pytest.raises(ValueError, match="specify one, such as results/NAME-STAMP"):
        trace_of(tmp_path)
    (tmp_path / "runs" / "one" / "config.toml").touch()
    with pytest.raises(
        ValueError, match=rf"not a run folder; specify its runs, {tmp_path}/runs/\*$"
    ):
        trace_of(tmp_path)


def test_trace_without_steps_names_the_attempt_that_has_them(tmp_path):
    """The resumed run failed before its first step, twice."""
    attempt(tmp_path, 0, 2)
    for _ in range(2):
        attempt(tmp_path, 2, 2)
    with hpc3d.trace.open(tmp_path) as trace, pytest.raises(ValueError, match="no step") as wrong:
        require_steps(trace)
    assert str(wrong.value).endswith(f"use the trace of an earlier attempt, {tmp_path}/trace-1.h5")


def test_previous_trace_is_named_if_the_attempt_has_none(tmp_path):
    attempt(tmp_path, 0, 2)
    (tmp_path / "config.toml").write_text("")
    set_aside(tmp_path, 1)
    with pytest.raises(ValueError, match=r"trace-1\.h5"):
        trace_of(tmp_path)
