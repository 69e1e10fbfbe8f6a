"""Simulate how the layer partition of a pipeline affects its memory (arXiv:2407.02081)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpc3d.predict.machine.machine import Machine
from hpc3d.studies.pp_vs_dp.experiment import resolved_config, step

_STAGES, _TABLE = (1, 2, 4, 8, 16), 51200


def partitions(
    machine: Machine,
    layers: int = 32,
    hidden: int = 1024,
    microbatches: int = 16,
    vocabulary: int = _TABLE,
    counts: Sequence[int] = _STAGES,
) -> list[dict[str, Any]]:
    """Return the memory usage of a balanced and an unbalanced pipeline per number of stages.

    In the unbalanced pipeline ("poor"), each stage except the first has only one layer.
    """
    sizes = {"hidden": hidden, "vocabulary": vocabulary, "sequence": 512}
    whole, half = (_memory(machine, [n], microbatches, sizes) for n in (layers, layers // 2))
    layer = (_activations(whole) - _activations(half)) / (layers - layers // 2)
    rows = []
    for name, stages_of in (("even", _even), ("poor", _poor)):
        for count in counts:
            stages = stages_of(layers, count)
            found = _memory(machine, stages, microbatches, sizes)
            rows.append({"partition": name} | _partition_row(found, stages, microbatches, layer))
    return rows


def _even(layers: int, count: int) -> list[int]:
    return [layers * (i + 1) // count - layers * i // count for i in range(count)]


def _poor(layers: int, count: int) -> list[int]:
    return [layers - count + 1] + [1] * (count - 1)


def _memory(
    machine: Machine, stages: Sequence[int], microbatches: int, sizes: dict[str, int]
) -> dict[str, Any]:
    """Simulate a training step with one sequence per microbatch, and return its summary."""
    parallel = {"microbatches": microbatches, "layers_per_stage": tuple(stages)}
    model = sizes | {"layers": sum(stages)}
    config = resolved_config(machine, {"p": len(stages)}, microbatches, parallel, **model)
    return step(machine, config)[1]


def _partition_row(
    found: Mapping[str, Any], stages: Sequence[int], microbatches: int, layer: float
) -> dict[str, Any]:
    """Return the total memory by kind and the maximum memory per rank, in bytes.

    `in_flight` is the number of layer activations that all stages hold, in closed form: stage i of
    p (i = 0, 1, ...) keeps the activations of its layers for min(m, p - i) of m microbatches. If L
    layers are partitioned evenly and m >= p, the sum is L (p + 1) / 2. `layers_held` is the
    activation memory in units of one layer and microbatch. `copies` is the memory of all copies of
    the token embedding table except the first, including their gradients and optimizer states.
    """
    ranks, worst = found["memory"]["stages"], found["memory"]["worst"]
    parameters, *others = (_total(ranks, kind) for kind in ("parameter", "gradient", "optimizer"))
    states = parameters + sum(others)
    spare = _total(ranks, "tables") - ranks[0]["tables"]
    copies = spare * states / parameters
    count = len(stages)
    return {
        "count": count,
        "stages": stages,
        "in_flight": sum(min(microbatches, count - i) * n for i, n in enumerate(stages)),
        "layers_held": _activations(found) / layer,
        "states": states - copies,
        "copies": copies,
        "activations": _activations(found),
        "buffers": _total(ranks, "communication") + _total(ranks, "workspace"),
        "total": found["memory"]["total"],
        "worst": worst["all"],
        "worst_stage": worst["stage"],
        "step_s": found["step_time_s"],
    }


def _total(ranks: Iterable[Mapping[str, float]], kind: str) -> float:
    return sum(peaks[kind] for peaks in ranks)


def _activations(found: Mapping[str, Any]) -> float:
    return _total(found["memory"]["stages"], "activation")
