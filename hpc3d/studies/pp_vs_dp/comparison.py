"""Compare pipeline and data parallelism on the same number of ranks (arXiv:2407.02081)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpc3d.arrays.narrow import itemsize
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.simulation.summary import exposed, moved, total_received
from hpc3d.studies.pp_vs_dp.experiment import dtype_of, resolved_config, step

_SLOWER = 16  # slowdown of the second network, relative to the machine's network
_HIDDEN, _BATCHES, _SEQUENCE = (512, 1024, 2048, 4096, 8192), (16, 64, 256, 1024), 256
_RANKS, _LAYERS = 16, 16
_MICROBATCHES = (1, 4, 16, 64)


def races(machine: Machine) -> list[dict[str, Any]]:
    """Compare pipeline and data parallelism for each network, hidden size and batch size.

    The pipeline has one microbatch per stage, or four microbatches per stage if the batch size
    is sufficient.
    """
    return [
        race(each, _RANKS, hidden, batch, _RANKS if batch < 16 * _RANKS else 4 * _RANKS)
        for each in (machine, slowed(machine, _SLOWER))
        for hidden in _HIDDEN
        for batch in _BATCHES
    ]


def by_microbatches(machine: Machine, hidden: int = 4096, batch: int = 64) -> list[dict[str, Any]]:
    """Compare pipeline and data parallelism for increasing numbers of microbatches."""
    return [race(machine, _RANKS, hidden, batch, count) for count in _MICROBATCHES]


def slowed(machine: Machine, factor: float) -> Machine:
    """Return a copy of a machine with slower outermost links and no measured call times."""
    *inner, link = machine.links
    rates = ("bandwidth", "node_bandwidth", "pair_bandwidth")
    slow = replace(link, **{rate: getattr(link, rate) / factor for rate in rates})
    name = f"{machine.name}, network {factor} times slower"
    return replace(machine, name=name, links=(*inner, slow), measured=())


def race(
    machine: Machine,
    ranks: int,
    hidden: int,
    batch: int,
    microbatches: int,
    layers: int = _LAYERS,
    sequence: int = _SEQUENCE,
) -> dict[str, Any]:
    """Compare a pipeline of `ranks` stages with data parallelism on `ranks` replicas.

    Only the pipeline uses microbatches. For T tokens, hidden size h, L layers, d replicas, and e
    bytes per activation and g bytes per gradient, a step sends 2 T h e bytes to an inner stage and
    2 (d-1)/d * 12 L h^2 * g bytes to a replica. The former is less if T < `boundary` =
    12 L h (d-1)/d * g/e. Exposed communication is the share of step time spent blocked in calls.
    """
    model = {"hidden": hidden, "layers": layers, "sequence": sequence}
    many = {"microbatches": microbatches}
    stages, piped = step(machine, resolved_config(machine, {"p": ranks}, batch, many, **model))
    replicas, copied = step(machine, resolved_config(machine, {"d": ranks}, batch, **model))
    wide = 4 / itemsize(dtype_of(machine))  # gradients are reduced in float32
    row = {
        "network": machine.name,
        "ranks": ranks,
        "hidden": hidden,
        "tokens": batch * sequence,
        "microbatches": microbatches,
        "boundary": 12 * layers * hidden * (1 - 1 / ranks) * wide,
        "pipeline_bytes": max(total_received(moved(run), "p") for run in stages),
        "data_bytes": total_received(moved(replicas[0]), "d"),
        "pipeline_s": piped["step_time_s"],
        "data_s": copied["step_time_s"],
        "ideal_bubble": (ranks - 1) / (microbatches + ranks - 1),
        "pipeline_exposed": min(map(exposed, stages)),
        "data_exposed": exposed(replicas[0]),
        "pipeline_memory": piped["memory"]["worst"]["all"],
        "data_memory": copied["memory"]["worst"]["all"],
        "data_fits": copied["memory"]["fits"],
    }
    row |= {"moves_less": _verdict(row, "bytes"), "wins": _verdict(row, "s")}
    return row | {"why": why(row)}


def _verdict(row: dict[str, Any], quantity: str) -> str:
    return "pipeline" if row[f"pipeline_{quantity}"] < row[f"data_{quantity}"] else "data"


def why(row: dict[str, Any]) -> str:
    """Return the reason why the strategy that moves more bytes is faster, or "" if it is slower.

    If data parallelism is faster, the reason is the largest cost of the pipeline: "bubble",
    "messages" (exposed communication beyond the bubble), or "passes" (inefficient kernels, because
    the microbatches are small). If the pipeline is faster, the reason is "sums", the gradient
    all-reduce of data parallelism.
    """
    if row["moves_less"] == row["wins"]:
        return ""
    if row["wins"] == "pipeline":
        return "sums"
    bubble, waits = row["ideal_bubble"], row["pipeline_exposed"]
    shares = {
        "bubble": bubble,
        "messages": waits - bubble,
        "passes": 1 - waits - row["data_s"] / row["pipeline_s"],
    }
    return max(shares, key=shares.get)
