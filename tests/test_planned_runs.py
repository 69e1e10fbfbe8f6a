"""Plans that are run: what is made of their steps."""

from types import SimpleNamespace

import pytest

from hpc3d.benchmarks import planned_runs
from hpc3d.benchmarks.planned_runs import PlannedStep, plans, summary


def test_summary_reports_errors_and_the_chosen_plan_of_each_model(capsys):
    steps = [
        PlannedStep("a", "chosen", 1.0, 2.0),
        PlannedStep("a", "other", 3.0, 1.0),
        PlannedStep("b", "chosen", 1.1, 1.0),
    ]
    found = summary(steps)
    assert found["median_error"] == 0.5 and found["largest_error"] == 2.0
    assert found["chosen"] == {"a": 2.0, "b": 1.0}
    assert "2.000 times as long as the fastest (other)" in capsys.readouterr().out


@pytest.mark.slow
def test_every_plan_of_a_small_model_is_run(monkeypatch, capsys):
    """How long it takes says nothing on a machine that is busy."""
    pytest.importorskip("torch")
    pytest.importorskip("networkx")
    model = "tests.partition.execution.modules:in_double"
    monkeypatch.setattr(planned_runs, "_MODELS", {"small": model})
    found = plans(SimpleNamespace(rounds=1))
    assert {step["plan"] for step in found["steps"]} > {"chosen", "2 stages, recomputed"}
    assert all(step["predicted"] > 0 and step["measured"] > 0 for step in found["steps"])
    assert found["chosen"]["small"] >= 1
