"""Simulate the cost of small gradient buckets and microbatches (arXiv:2407.02081)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.simulation.count import COMM
from hpc3d.predict.simulation.simulator import StageRun
from hpc3d.studies.pp_vs_dp.experiment import resolved_config, step

_RANKS = 16  # number of replicas
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)  # gradient bucket sizes in MB
# Maps each scheme to a pair: its mesh, and the collective that transfers the most bytes along the
# innermost axis.
_TENSOR = {"1d": ({"x": 8}, "all_reduce"), "2d-summa": ({"x": 2, "y": 4}, "broadcast")}
_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)


def buckets(
    machine: Machine,
    hidden: int = 512,
    layers: int = 24,
    batch: int = 64,
    sequence: int = 256,
    sizes: Sequence[int] = _BUCKETS,
) -> list[dict[str, Any]]:
    """Return the step time for each gradient bucket size, with and without overlap.

    `message` is the mean number of bytes received by a rank in an all-reduce. `half` is the
    message size at which the all-reduce reaches half of its asymptotic bandwidth.
    """
    model = {"hidden": hidden, "layers": layers, "sequence": sequence}
    half = half_bytes(machine, "all_reduce", range(_RANKS))
    return [
        {"half": half} | _bucket_row(machine, size, overlap, batch, model)
        for overlap in (True, False)
        for size in sizes
    ]


def microbatches(
    machine: Machine,
    hidden: int = 1024,
    layers: int = 8,
    batch: int = 512,
    sequence: int = 32,
    counts: Sequence[int] = _MICROBATCHES,
) -> list[dict[str, Any]]:
    """Return the step time for each scheme and number of microbatches.

    With more microbatches, tensor-parallel messages are smaller.
    """
    model = {"hidden": hidden, "layers": layers, "sequence": sequence}
    return [
        _tensor_row(machine, scheme, count, batch, model) for scheme in _TENSOR for count in counts
    ]


def half_bytes(machine: Machine, op: str, members: Iterable[int]) -> float:
    """Return the message size in bytes at which a call reaches half of its peak bandwidth.

    If a call with n bytes takes the time alpha + beta n, this is Hockney's n1/2 = alpha / beta.
    """
    members, large = tuple(members), 2.0**36
    beta = (machine.call(op, 2 * large, members) - machine.call(op, large, members)) / large
    low, high = 1.0, large
    while high > 1.001 * low:
        size = (low * high) ** 0.5
        reached = size * beta >= machine.call(op, size, members) / 2
        low, high = (low, size) if reached else (size, high)
    return high


def _bucket_row(
    machine: Machine, size: float, overlap: bool, batch: int, model: Mapping[str, int]
) -> dict[str, Any]:
    parallel = {"bucket_mb": size, "overlap": overlap}
    runs, found = step(machine, resolved_config(machine, {"d": _RANKS}, batch, parallel, **model))
    sums = calls(runs[0], "d")
    return {
        "overlap": overlap,
        "bucket_mb": size,
        "calls": len(sums),
        "message": _mean_bytes(sums),
        "exposed_s": found["communication"] * found["step_time_s"],
        "step_s": found["step_time_s"],
    }


def _tensor_row(
    machine: Machine, scheme: str, count: int, batch: int, model: Mapping[str, int]
) -> dict[str, Any]:
    """Return the table row for a scheme with `count` microbatches.

    The communication volume of 1-D tensor parallelism does not depend on the number of
    microbatches. In contrast, SUMMA communicates the weight panels again for each microbatch.
    """
    mesh, op = _TENSOR[scheme]
    parallel = {"scheme": scheme, "microbatches": count}
    runs, found = step(machine, resolved_config(machine, mesh, batch, parallel, **model))
    rows = calls(runs[0], *mesh)
    *_, inner = mesh.values()
    return {
        "scheme": scheme,
        "microbatches": count,
        "calls": len(rows),
        "message": _mean_bytes(rows),
        "half": half_bytes(machine, op, range(inner)),
        "calls_s": float(rows["dur"].sum() / 1e9),
        "step_s": found["step_time_s"],
    }


def calls(run: StageRun, *axes: str) -> np.ndarray:
    """Return the communication events of a simulated run on groups along the given mesh axes."""
    groups = [number for number, axis in enumerate(run.axes) if axis in axes]
    return run.rows[(run.rows["category"] == COMM) & np.isin(run.rows["group"], groups)]


def _mean_bytes(rows: np.ndarray) -> float:
    return float(rows["bytes"].mean())
