"""Runs of plans, and the summary of their step times."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hpc3d.benchmarks import planned_runs
from hpc3d.benchmarks.planned_runs import PlannedStep, planners, plans, summary


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
    """Times on a busy machine are meaningless, so they are not tested."""
    pytest.importorskip("torch")
    pytest.importorskip("networkx")
    model = "tests.partition.execution.modules:in_double"
    monkeypatch.setattr(planned_runs, "_MODELS", {"small": model})
    found = plans(SimpleNamespace(rounds=1))
    assert {step["plan"] for step in found["steps"]} > {"chosen", "2 stages, recomputed"}
    assert all(step["predicted"] > 0 and step["measured"] > 0 for step in found["steps"])
    assert found["chosen"]["small"] >= 1


@pytest.mark.slow
def test_plans_of_two_planners_run_alternately(monkeypatch, capsys, tmp_path):
    """RaNNC reorders the operations of the model; its stages contain pieces in its own order."""
    pytest.importorskip("torch")
    pytest.importorskip("networkx")
    from hpc3d.config.package_data import default_machine
    from hpc3d.partition import plan_file
    from hpc3d.partition.baselines.contenders import Task
    from hpc3d.partition.baselines.rannc_plan import rannc
    from hpc3d.partition.capture import captured_of
    from hpc3d.partition.operation_costs import Operations
    from hpc3d.predict.machine import machine_file

    model, machine = "inputs.partition.translation:small", machine_file.load(default_machine())
    captured, memory = captured_of(model), 1e6
    task = Task.of(Operations(captured), machine, captured.batch, 2, memory)
    expected = rannc(task)
    atoms = expected.costs.graph(1).atoms[: expected.choice.stages[0].end]
    runs, seconds = [], iter([2.0, 1.0, 4.0, 4.0, 3.0, 4.0])

    def step(planned, folder):
        runs.append(planned)
        return next(seconds)

    monkeypatch.setattr(planned_runs, "_MODELS", {"small": model})
    pair = planned_runs._Pair("small", "rannc_plan.rannc", memory)
    monkeypatch.setattr(planned_runs, "_PAIRS", [pair])
    monkeypatch.setattr(planned_runs, "_costs", lambda *_: task.costs)
    monkeypatch.setattr(planned_runs, "_step", step)
    monkeypatch.setattr(planned_runs.tempfile, "TemporaryDirectory", lambda: nullcontext(tmp_path))
    (found,) = planners(SimpleNamespace(rounds=3))["pairs"]
    assert [each.name for each in runs] == ["ours", "RaNNC"] * 3
    plan = plan_file.load(runs[1].path)
    assert plan.pieces(captured)[0] == sorted(piece for atom in atoms for piece in atom.pieces)
    assert (found["ours_s"], found["theirs_s"], found["ratio"]) == (3.0, 4.0, 1.0)
    assert found["ours_predicted_s"] <= found["theirs_predicted_s"]
    assert "small: with hpc3d's plan, a step takes 1.000 times as long" in capsys.readouterr().out
