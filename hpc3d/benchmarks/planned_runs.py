"""Compare predicted and measured step times of plans for torch modules on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
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
_STEPS, _SKIPPED, _ROUNDS = 24, 4, 3


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

    path = folder / f"{model}-{ranks}-ranks.json"
    for line in harness.printed(ranks, ["partition", "profile", _MODELS[model], "-o", str(path)]):
        print(f"{model}, {ranks} ranks: {line}", end="", flush=True)
    profile = measured_profile.load(path)
    return profile.costs(captured, profile.machine(ranks))


def _plan(
    model: str, captured: Captured, costs: ModelCosts, how: dict[str, Any]
) -> tuple[SavedPlan, float]:
    """Return the plan with the shortest predicted step time, and the predicted time in s.

    `how` restricts the plans that are considered; its keys are field names of `Wanted`.
    """
    from hpc3d.partition.module_plan import Wanted, best_plan
    from hpc3d.partition.plan_file import saved

    plan = best_plan(costs, Wanted(**{"recompute": "none", **how}))
    kept = saved(plan, captured, _MODELS[model], "measured")
    return kept._replace(predicted={}), plan.step.seconds


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

    The slowdown is the measured step time of the plan chosen for a model, relative to the fastest
    plan for this model.
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
