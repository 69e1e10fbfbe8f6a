"""A predicted step, and optional rows of its summary."""

import re

import pytest

from hpc3d import trace
from hpc3d.analyze.report.run_analysis import analyze_run
from hpc3d.predict.predicted_step import predicted_step
from hpc3d.predict.simulation import write_trace
from tests.mpi import ROOT

TINY = ["--model.layers=2", "--model.hidden=32", "--model.heads=4", "--train.batch=4"]
EVALUATED = ["--train.eval_every=2", "--data.validation=0.1"]


def test_summary_has_evaluation_and_mixture_rows_only_if_used():
    optional = {"evaluation_batch_s", "evaluation_peak_bytes", "mixture"}
    assert not optional & {*step().summary}
    found = step(*EVALUATED, "--train.backend=cupy").summary
    assert found["evaluation_batch_s"] > 0
    assert 0 < found["evaluation_peak_bytes"] < found["memory"]["worst"]["all"]
    assert step("--model.experts=4").summary["mixture"]["blocks"] == 2


def step(*words):
    return predicted_step("gpt-serial", [*TINY, *words], "h100")


def test_prediction_is_saved_in_a_new_folder(tmp_path):
    path = step().keep(tmp_path / "above" / "kept")
    assert path == tmp_path / "above" / "kept" / "trace.h5" and path.is_file()


def test_failure_removes_the_folders_of_the_prediction(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_trace, "merge", full)
    with pytest.raises(OSError, match="No space left"):
        step().keep(tmp_path / "above" / "kept")
    assert not [*tmp_path.iterdir()]


def test_events_of_the_default_step_are_as_documented():
    run, *_ = predicted_step("gpt-3d-64", [], "h100").runs
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (count,) = re.findall(r"`simulate gpt-3d-64 [^`]*` writes (\d+) events per rank", text)
    assert len(run.rows) == int(count)


GPUS = ["--train.backend=cupy", "--train.cuda_graph=true"]


WHY = "none, because with model.capacity = 0, "


@pytest.mark.parametrize(("capacity", "text"), [(4, "one launch for "), (0, WHY)])
def test_simulated_report_describes_the_cuda_graph(capacity, text, tmp_path):
    found = step(*GPUS, "--model.experts=4", f"--model.capacity={capacity}")
    line = found.summary["cuda_graph"]
    assert line.startswith(text)
    with trace.open(found.keep(tmp_path / "kept").parent) as opened:
        assert analyze_run(opened).about["CUDA graph"] == line


def test_cpus_have_no_cuda_graph():
    assert "cuda_graph" not in step().summary
