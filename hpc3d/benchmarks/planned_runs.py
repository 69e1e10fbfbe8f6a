"""Plans of torch modules by a profile of this machine, and their steps when they are run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.benchmarks import harness
from hpc3d.trace import open as opened

if TYPE_CHECKING:
    from argparse import Namespace

_RANKS = 2
_MODELS = {
    "BERT": "inputs.partition.bert:made(256, 4, 4, 16, 64, vocabulary=2000)",
    "ResNet": "inputs.partition.resnet:made((1, 1, 1), 16, 64, 10, narrow=16)",
    "U-Net": "inputs.partition.unet:made(8, 3, 8, 64)",
    "Translation": "inputs.partition.translation:made(192, 2, 4, 16, 32, vocabulary=2000)",
}
_CHOSEN = "chosen"
_PLANS = {
    _CHOSEN: {},
    "one rank": {"replicas": (1,), "microbatches": 1, "ranks": 1},
    "one rank, 4 microbatches": {"replicas": (1,), "microbatches": 4, "ranks": 1},
    "2 replicas": {"replicas": (2,), "microbatches": 1},
    "2 stages, 1F1B of 4": {"replicas": (1, 1), "microbatches": 4, "schedule": "1f1b"},
    "2 stages, GPipe of 8": {"replicas": (1, 1), "microbatches": 8, "schedule": "gpipe"},
    "2 stages, again": {
        "replicas": (1, 1),
        "microbatches": 4,
        "schedule": "1f1b",
        "recompute": "full",
    },
}
_STEPS, _SKIPPED, _ROUNDS = 8, 2, 3


class PlannedStep(NamedTuple):
    """Seconds of a step of a plan of a model, both by name."""

    model: str
    plan: str
    predicted: float
    measured: float


class _Planned(NamedTuple):
    """A plan of a model: its file, its ranks, and the predicted seconds of a step."""

    model: str
    name: str
    path: Path
    ranks: int
    predicted: float


def plans(options: Namespace) -> dict[str, Any]:
    """Predicted and measured steps; the least of the medians of `--rounds` runs of each plan, one
    plan after the other in every round."""
    with tempfile.TemporaryDirectory() as folder:
        found = [each for model in _MODELS for each in _planned(model, Path(folder))]
        runs = [[_step(each, folder) for each in found] for _ in range(options.rounds or _ROUNDS)]
    steps = [
        PlannedStep(each.model, each.name, each.predicted, min(times))
        for each, times in zip(found, zip(*runs, strict=True), strict=True)
    ]
    return {"steps": [step._asdict() for step in steps], **summary(steps)}


def _planned(name: str, folder: Path) -> Iterator[_Planned]:
    """The plans of a model by a profile that is measured now."""
    from hpc3d.partition import measured_profile
    from hpc3d.partition.capture import capture
    from hpc3d.partition.factory import made

    path = folder / f"{name}.json"
    words = ["partition", "profile", _MODELS[name], "-o", str(path)]
    for line in harness.printed(_RANKS, words):
        print(f"{name}: {line}", end="", flush=True)
    profile, captured = measured_profile.load(path), capture(*made(_MODELS[name]))
    costs = profile.costs(captured, profile.machine(_RANKS))
    for number, (title, how) in enumerate(_PLANS.items()):
        yield _written(name, title, (captured, costs, how), folder / f"{name}-{number}.json")


def _written(model, title, task, path):
    """The plan of a task, in a file."""
    from hpc3d.partition.module_plan import Wanted, best_plan
    from hpc3d.partition.plan_file import saved

    captured, costs, how = task
    plan = best_plan(costs, Wanted(**{"ranks": _RANKS, "recompute": "none", **how}))
    kept = saved(plan, captured, _MODELS[model], "measured")
    path.write_text(kept.text(), "utf-8")
    return _Planned(model, title, path, kept.ranks, plan.step.seconds)


def _step(planned: _Planned, folder: str) -> float:
    """The median step of a run in seconds."""
    words = ["run", str(planned.path)]
    done = harness.run(planned.ranks, words, folder, _STEPS, "partition")
    with opened(done["folder"] / "trace.h5") as trace:
        steps = trace.steps
        mine = (steps["rank"] == 0) & (steps["step"] >= _SKIPPED)
        seconds = median(((steps["t_end"] - steps["t_start"])[mine] * 1e-9).tolist())
    error = planned.predicted / seconds - 1
    times = f"{seconds * 1e3:8.1f} ms, predicted {planned.predicted * 1e3:8.1f} ms {error:+7.1%}"
    print(f"{planned.model:12} {planned.name:26} {times}", flush=True)
    return seconds


def summary(steps: Sequence[PlannedStep]) -> dict[str, Any]:
    """The errors, and by model what the chosen plan takes beside the fastest that was run."""
    errors = [abs(step.predicted / step.measured - 1) for step in steps]
    middle, most = median(errors), max(errors)
    print(f"error of {len(steps)} plans: {middle:.1%} in the median, {most:.1%} at worst")
    chosen = {}
    for model in dict.fromkeys(step.model for step in steps):
        times = {step.plan: step.measured for step in steps if step.model == model}
        fastest = min(times, key=times.get)
        chosen[model] = times[_CHOSEN] / times[fastest]
        print(f"{model}: the chosen plan takes {chosen[model]:.3f} times the fastest ({fastest})")
    return {"median_error": middle, "largest_error": most, "chosen": chosen}
