"""Compare data, pipeline and tensor parallelism side by side (arXiv:2407.02081)."""

from __future__ import annotations

from typing import Any

from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.simulation.summary import total_received
from hpc3d.studies.pp_vs_dp.experiment import resolved_config, step

# Each strategy uses one mesh axis for all ranks, and has the keys in [parallel] that it needs.
_STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DP": ("d", {}),
    "ZeRO 1": ("d", {"zero": 1}),
    "ZeRO 2": ("d", {"zero": 2}),
    "ZeRO 3": ("d", {"zero": 3}),
    "PP": ("p", {}),
    "TP": ("x", {"scheme": "1d"}),
    "TP, sequence": ("x", {"scheme": "1d-sequence"}),
}
_MICROBATCHES = 4  # per pipeline stage


def strategies(
    machine: Machine,
    ranks: int = 8,
    layers: int = 16,
    hidden: int = 2048,
    batch: int = 32,
    sequence: int = 1024,
) -> list[dict[str, Any]]:
    """Simulate a step of each strategy on `ranks` ranks.

    Returns a dict for each strategy. It contains the step time; the computation, exposed
    communication and idle time of the busiest stage; the bytes that a rank of the first stage
    receives; and the peak memory, by kind, of the rank with the highest peak.
    """
    rows = []
    model = {"hidden": hidden, "layers": layers, "sequence": sequence}
    for name, (axis, keys) in _STRATEGIES.items():
        micros = min(batch, _MICROBATCHES * ranks) if axis == "p" else 1
        parallel = keys | {"microbatches": micros}
        _, found = step(machine, resolved_config(machine, {axis: ranks}, batch, parallel, **model))
        rows.append(
            {
                "strategy": name,
                "ranks": ranks,
                **model,
                "tokens": batch * sequence,
                "step_s": found["step_time_s"],
                **found["time"],
                "received_bytes": total_received(found["bytes"]),
                "memory": found["memory"]["worst"],
                "total_bytes": found["memory"]["total"],
            }
        )
    return rows
