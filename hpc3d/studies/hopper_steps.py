"""Predict published training steps on H100 GPUs.

inputs/published/h100-steps.json contains the published step times, their sources, and the layouts
in the keys of an input file. A hash of a row's name determines whether its error may be examined
to improve the model ("used"), or only serves to check predictions ("held out").
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.config.load import literal
from hpc3d.config.package_data import shipped
from hpc3d.predict.error_intervals import kind_of_layout
from hpc3d.predict.machine.machine import LEAST_FOR_PERCENTILES, AttentionRates, Errors
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from hpc3d.predict.simulation.summary import summary

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine

# FlashAttention-2 on an H100 (arXiv:2407.08608, figures 5 and 6), in 1e12 FLOP/s, for 512, 1,024,
# 2,048, ... tokens with a causal mask, as in all rows. Only the forward pass with head dimension
# 128 is published; the other rates rest on the same assumptions as in machines/h100.toml.
_FLASH_2 = {
    (64, False): (174, 227, 262, 278, 290, 293),
    (128, False): (191, 260, 298, 319, 333, 335),
    (64, True): (122, 177, 217),
    (128, True): (132, 193, 240, 269, 286, 292),
}
# FlashAttention in Triton: FlashAttention-2 is 1.3 to 1.5 times as fast in the forward pass, and
# about twice as fast in the backward pass (arXiv:2307.08691, section 4.1).
_SLOWER = {False: 1.4, True: 2.0}
_TRITON = "llm-foundry, MPT (FSDP)"  # kind of the rows that use it
_USES = "used", "held out", "all"
_TOTALS = *_USES, "all but nanotron"
_COMMON = {"train.dtype": "bfloat16", "train.backend": "cupy"}


def published() -> list[dict[str, Any]]:
    """Return the rows of h100-steps.json."""
    return json.loads(shipped("published/h100-steps.json").read_text())


def held_out(name: str) -> bool:
    """Return whether the row `name` is held out, by the parity of a hash of its name."""
    return sha256(name.encode()).digest()[0] % 2 == 1


def config_of(row: dict[str, Any]) -> Config:
    """Return the resolved configuration of a published row.

    Raises ValueError if hpc3d does not support the layout.
    """
    keys = row["layout"] | _COMMON
    return load_resolved(None, [f"--{key}={literal(value)}" for key, value in keys.items()])


def machine_of(row: dict[str, Any], machine: Machine) -> Machine:
    """Return `machine`, modified as the row specifies.

    The key `machine` of the row contains factors of the memory and network bandwidth, and whether
    the published program computes attention with FlashAttention instead of cuDNN.
    """
    factors = {"memory": 1.0, "network": 1.0} | row.get("machine", {})
    flash = _flash(row.get("kind") == _TRITON)
    attention = flash if factors.get("flash_2") else machine.attention
    *inner, last = machine.links
    slower = factors["network"]
    last = replace(
        last, bandwidth=slower * last.bandwidth, node_bandwidth=slower * last.node_bandwidth
    )
    memory = factors["memory"] * machine.memory_bandwidth
    links = *inner, last
    return replace(machine, links=links, memory_bandwidth=memory, attention=attention)


def _flash(triton: bool) -> tuple[AttentionRates, ...]:
    """Return the rates of FlashAttention-2, or of FlashAttention in Triton."""
    return tuple(
        AttentionRates(
            width,
            causal=True,
            backward=backward,
            sequence=tuple(512.0 * 2**power for power in range(len(rates))),
            rate=tuple(1e12 * rate / (_SLOWER[backward] if triton else 1) for rate in rates),
        )
        for (width, backward), rates in _FLASH_2.items()
    )


def predicted(row: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Predict a published row.

    Returns
    -------
    dict
        The name, kind and published step time of the row, and `held_out`. If hpc3d supports the
        layout, also the kind of layout, the number of ranks, the predicted step time, the relative
        error, the MFU, the fraction of communication, the peak memory in GB, and whether the
        layout fits in memory.
        If hpc3d does not support the layout, `refused` is the reason.
    """
    machine = machine_of(row, machine)
    found = {name: row[name] for name in ("id", "kind", "seconds")}
    found["held_out"] = held_out(row["id"])
    try:
        config = config_of(row)
    except ValueError as error:
        return found | {"refused": str(error).splitlines()[0]}
    step = summary(simulate(config, config.model.vocabulary, machine), config, machine)
    return found | {
        "layout": kind_of_layout(config),
        "ranks": step["ranks"],
        "predicted_s": step["step_time_s"],
        "error": step["step_time_s"] / row["seconds"] - 1,
        "mfu": step["mfu"],
        "communication": step["communication"],
        "memory_GB": step["memory"]["worst"]["all"] / 1e9,
        "fits": step["memory"]["fits"],
    }


def by_kind(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize the relative errors of predicted rows.

    Returns
    -------
    dict
        A dict from each group of rows to the number of predicted rows and the mean absolute,
        median absolute, mean signed and largest error. The groups are the kinds of rows, and
        the used, held-out and all rows, and all rows but those of nanotron.
    """
    groups = defaultdict(list)
    for row in found:
        if "error" in row:
            groups[row["kind"]].append(row["error"])
    kinds = [*groups]
    for row in found:
        if "error" in row:
            for name in _totals(row):
                groups[name].append(row["error"])
    order = [*kinds, *(name for name in _TOTALS if name in groups)]
    return {name: _statistics(groups[name]) for name in order}


def by_layout(found: Sequence[dict[str, Any]]) -> list[Errors]:
    """Return the ratios of published to predicted step times for each kind of layout.

    The rows of nanotron are excluded, because their network is not described.
    """
    ratios = defaultdict(list)
    for row in found:
        if "error" in row and not row["kind"].startswith("nanotron"):
            ratios[row["layout"]].append(1 / (1 + row["error"]))
    return [_errors(kind, each) for kind, each in sorted(ratios.items())]


def _errors(kind: str, ratios: Sequence[float]) -> Errors:
    outside = 0.1 if len(ratios) >= LEAST_FOR_PERCENTILES else 0.0
    low, high = np.quantile(ratios, (outside, 1 - outside))
    return Errors(kind, len(ratios), round(float(low), 3), round(float(high), 3))


def _totals(row: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the totals that include a row."""
    yield "held out" if row["held_out"] else "used"
    yield "all"
    if not row["kind"].startswith("nanotron"):
        yield "all but nanotron"


def _statistics(errors: Sequence[float]) -> dict[str, Any]:
    sizes = [*map(abs, errors)]
    return {
        "rows": len(errors),
        "mean": mean(sizes),
        "median": median(sizes),
        "signed": mean(errors),
        "worst": max(errors, key=abs),
    }
