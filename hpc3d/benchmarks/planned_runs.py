"""Compare predicted and measured step times of plans for torch modules on this machine.

`plans` compares plans of hpc3d, and `planners` compares hpc3d's plans with other planners' plans.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.benchmarks import harness
from hpc3d.console.sanitize import counted
from hpc3d.trace import open as opened

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.partition.capture import Captured
    from hpc3d.partition.evaluation import ModelCosts
    from hpc3d.partition.module_plan import ModulePlan
    from hpc3d.partition.plan_file import SavedPlan

_MODELS = {
    "BERT": "inputs.partition.bert:made(256, 4, 4, 16, 64, vocabulary=2000)",
    "ResNet": "inputs.partition.resnet:made((1, 1, 1), 16, 64, 10, narrow=32)",
    "U-Net": "inputs.partition.unet:made(8, 3, 8, 64)",
    "Translation": "inputs.partition.translation:made(192, 2, 4, 16, 32, vocabulary=2000)",
}
_PIPELINE = {"ranks": 2, "replicas": (1, 1), "schedule": "1f1b"}
_CHOSEN = "chosen"
_PLANS = {
    "one rank": {"ranks": 1, "microbatches": 1},
    "one rank, 4 microbatches": {"ranks": 1, "microbatches": 4},
    "2 replicas": {"ranks": 2, "replicas": (2,), "microbatches": 1},
    "2 stages, 1F1B of 4": {**_PIPELINE, "microbatches": 4},
    "2 stages, GPipe of 8": {**_PIPELINE, "microbatches": 8, "schedule": "gpipe"},
    "2 stages, recomputed": {**_PIPELINE, "microbatches": 4, "recompute": "full"},
    _CHOSEN: {"ranks": 2},
}
_STEPS, _SKIPPED, _ROUNDS, _PAIRED_ROUNDS = 24, 4, 3, 7


class _Pair(NamedTuple):
    """Model to be trained with the plans of hpc3d and of another planner.

    `planner` is the path of a function in hpc3d.partition.baselines. Plans may use `memory` bytes
    per rank.
    """

    model: str
    planner: str
    memory: float


# BERT does not fit into 63 MB on one rank, so that both planners need two stages.
_PAIRS = _Pair("BERT", "rannc_plan.rannc", 63e6), _Pair("ResNet", "contenders.gpipe", 1e9)
_OURS = "side_by_side.ours"


class PlannedStep(NamedTuple):
    """Predicted and measured step time of a plan for a model, in seconds."""

    model: str
    plan: str
    predicted: float
    measured: float


class _Planned(NamedTuple):
    """Plan for a model, with the predicted step time in seconds and the path of the plan file.

    Identical plans share a file. `ranks` is the number of ranks required by the plan.
    """

    model: str
    name: str
    predicted: float
    path: Path
    ranks: int


def plans(options: Namespace) -> dict[str, Any]:
    """Return the predicted and measured step times of all plans.

    Other load on the machine can only increase step times. Therefore, the measured time of a run
    is the first quartile of its step times, and the measured time of a plan is the minimum over
    `--rounds` runs. In each round, every plan runs once.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = [each for model in _MODELS for each in _planned(model, Path(folder))]
        files = {each.path: each for each in found}
        times: dict[Path, list[float]] = {path: [] for path in files}
        for _ in range(options.rounds or _ROUNDS):
            for path, each in files.items():
                times[path].append(_step(each, folder))
    steps = [
        PlannedStep(each.model, each.name, each.predicted, min(times[each.path])) for each in found
    ]
    return {"steps": [step._asdict() for step in steps], **summary(steps)}


def planners(options: Namespace) -> dict[str, Any]:
    """Return the predicted and measured step times of hpc3d's and other planners' plans.

    All plans use 2 ranks. In each of `--rounds` rounds, both plans of a pair run once.
    """
    rounds = options.rounds or _PAIRED_ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        return {"pairs": [_paired(pair, Path(folder), rounds) for pair in _PAIRS]}


def _paired(pair: _Pair, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure both plans of a pair; return their times and the ratio of hpc3d's to the other's."""
    plans = ours, other = _by_planners(pair, folder)
    times = [[_step(each, str(folder)) for each in plans] for _ in range(rounds)]
    found = harness.ratios(*zip(*times, strict=True))
    predicted = ours.predicted / other.predicted
    print(
        f"{pair.model}: with hpc3d's plan, a step takes {found['ratio']:.3f} times as long as "
        f"with the plan of {other.name} ({found['ratio_min']:.3f} to {found['ratio_max']:.3f}); "
        f"predicted {predicted:.3f}"
    )
    seconds = {"ours_predicted_s": ours.predicted, "theirs_predicted_s": other.predicted}
    return {"model": pair.model, "planner": other.name, **seconds, **found}


def _by_planners(pair: _Pair, folder: Path) -> list[_Planned]:
    """Return the plans of hpc3d and of the other planner, based on profiled operation costs."""
    from hpc3d.partition.baselines.contenders import Task
    from hpc3d.partition.capture import captured_of
    from hpc3d.partition.module_plan import ModulePlan
    from hpc3d.partition.operation_costs import Operations

    captured = captured_of(_MODELS[pair.model])
    task = Task(Operations(captured), _costs(pair.model, captured, 2, folder), 2, pair.memory)
    found = []
    for path in (_OURS, pair.planner):
        module, _, planner = path.partition(".")
        each = getattr(import_module(f"hpc3d.partition.baselines.{module}"), planner)(task)
        assert each.choice and each.step, each.note
        costs = each.costs or task.costs
        plan = ModulePlan(each.choice, each.step, [], costs, pair.memory, "time")
        kept, place = _kept(pair.model, plan, captured), folder / f"{pair.model}-{planner}.json"
        place.write_text(kept.text(), "utf-8")
        found.append(_Planned(pair.model, each.name, each.step.seconds, place, kept.ranks))
    return found


def _planned(model: str, folder: Path) -> list[_Planned]:
    """Return the plans for a model, based on operation costs profiled on 1 and 2 ranks."""
    from hpc3d.partition.capture import captured_of

    captured = captured_of(_MODELS[model])
    costs = {ranks: _costs(model, captured, ranks, folder) for ranks in (1, 2)}
    found: list[_Planned] = []
    same: dict[str, Path] = {}
    for name, how in _PLANS.items():
        plan, predicted = _plan(model, captured, costs[how["ranks"]], how)
        path = same.setdefault(plan.text(), folder / f"{model}-{len(same)}.json")
        path.write_text(plan.text(), "utf-8")
        found.append(_Planned(model, name, predicted, path, plan.ranks))
    return found


def _costs(model: str, captured: Captured, ranks: int, folder: Path) -> ModelCosts:
    from hpc3d.partition import measured_profile
    from hpc3d.partition.model_graph import costs_of

    path = folder / f"{model}-{ranks}-ranks.json"
    for line in harness.printed(ranks, ["partition", "profile", _MODELS[model], "-o", str(path)]):
        print(f"{model}, {ranks} ranks: {line}", end="", flush=True)
    profile = measured_profile.load(path)
    return costs_of(profile.operations(captured), profile.machine(ranks))


def _plan(
    model: str, captured: Captured, costs: ModelCosts, how: dict[str, Any]
) -> tuple[SavedPlan, float]:
    """Return the plan with the shortest predicted step time, and the predicted time in s.

    `how` restricts the plans that are considered; its keys are field names of `Wanted`.
    """
    from hpc3d.partition.module_plan import Wanted, best_plan

    plan = best_plan(costs, Wanted(**{"recompute": "none", **how}))
    return _kept(model, plan, captured), plan.step.seconds


def _kept(model: str, plan: ModulePlan, captured: Captured) -> SavedPlan:
    """Return a plan without its predictions, so that equal plans have equal plan files."""
    from hpc3d.partition.plan_file import saved

    return saved(plan, captured, _MODELS[model], "measured")._replace(predicted={})


def _step(planned: _Planned, folder: str) -> float:
    """Run a plan, and return the first quartile of the step times in seconds."""
    done = harness.run(planned.ranks, ["run", str(planned.path)], folder, _STEPS, "partition")
    with opened(done["folder"] / "trace.h5") as trace:
        spent = harness.wall_times(trace, _SKIPPED).tolist()
    seconds = quantiles(spent, n=4)[0]
    error = planned.predicted / seconds - 1
    times = f"{seconds * 1e3:8.1f} ms, predicted {planned.predicted * 1e3:8.1f} ms {error:+7.1%}"
    print(f"{planned.model:12} {planned.name:26} {times}", flush=True)
    return seconds


def summary(steps: Sequence[PlannedStep]) -> dict[str, Any]:
    """Print and return the prediction errors and the slowdowns of the chosen plans.

    The slowdown of a model is the measured step time of its chosen plan, divided by the measured
    step time of its fastest plan.
    """
    errors = [abs(step.predicted / step.measured - 1) for step in steps]
    middle, most = median(errors), max(errors)
    plans = counted(len(steps), "plan")
    print(f"prediction error of {plans}: median {middle:.1%}, maximum {most:.1%}")
    chosen = {}
    for model in dict.fromkeys(step.model for step in steps):
        times = {step.plan: step.measured for step in steps if step.model == model}
        fastest = min(times, key=times.get)
        chosen[model] = times[_CHOSEN] / times[fastest]
        slower = f"{chosen[model]:.3f} times as long as the fastest ({fastest})"
        print(f"{model}: the chosen plan takes {slower}")
    return {"median_error": middle, "largest_error": most, "chosen": chosen}
