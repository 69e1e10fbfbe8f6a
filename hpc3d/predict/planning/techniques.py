"""Effects of individual memory, precision, optimizer and communication settings.

Each setting is simulated in a given layout and compared with the unchanged input.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc3d.config.input_file import Config
from hpc3d.console.sanitize import lines_of
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from hpc3d.predict.simulation.summary import mean_received, summary

log = logging.getLogger(__name__)

# Each technique is one (key, value) change of an input file.
TECHNIQUES = (
    ("parallel.recompute", "selective"),
    ("parallel.recompute", '["layernorm"]'),
    ("parallel.recompute", '["mlp_act"]'),
    ("parallel.recompute", '["mlp"]'),
    ("parallel.recompute", "full"),
    ("parallel.keep_dtype", "bfloat16"),
    ("parallel.keep_dtype", "int8"),
    ("parallel.keep_dtype", "float8"),
    ("parallel.reduce_dtype", "bfloat16"),
    ("parallel.keep_gathered", "false"),
    ("parallel.prefetch", "true"),
    ("parallel.chunked_products", "2"),
    ("parallel.chunked_products", "4"),
    ("parallel.attention", "chunked"),
    ("parallel.zero", "1"),
    ("parallel.zero", "2"),
    ("parallel.zero", "3"),
    ("train.product_dtype", "float8"),
    ("train.optimizer", "adamw-8bit"),
    ("train.optimizer", "adafactor"),
    ("train.optimizer", "lion"),
    ("train.optimizer", "muon"),
    ("parallel.compression", "powersgd"),
    ("parallel.compression", "top-k"),
    ("train.optimizer", "sgd"),
    ("parallel.offload", '["optimizer"]'),
    ("parallel.offload", '["activations"]'),
    ("parallel.offload", '["parameters"]'),
)
_OF_MUON = (("train.orthogonalize", "sharded"),)


class Effect(NamedTuple):
    """Simulated training step of an input with one `change`.

    `memory` maps each kind of memory to bytes, on the rank with the highest peak. `received` is
    the number of bytes that a rank of stage 0 receives per step, and `seconds` is the step time.
    If the change is invalid, `refused` is the reason.
    """

    change: str
    memory: dict[str, int]
    received: int
    seconds: float
    refused: str = ""

    def plain(self, first: Effect) -> dict[str, Any]:
        """Return a JSON-serializable dict for `--json`, with ratios to the `first` Effect."""
        if self.refused:
            return {"change": self.change, "refused": self.refused}
        return {
            "change": self.change,
            "peak_bytes": self.memory["all"],
            "memory": self.memory,
            "received_bytes": self.received,
            "step_time_s": self.seconds,
            "of_peak": self.memory["all"] / first.memory["all"],
            "of_received": self.received / first.received if first.received else None,
            "of_step_time": self.seconds / first.seconds,
        }


def effects(
    source: Path | str, overrides: Sequence[str], ranks: int, machine: Machine
) -> Iterator[Effect]:
    """Yield the Effect of the unchanged input, then of each setting that differs from it."""
    config = load_resolved(source, overrides, ranks)
    yield _effect("as it is", config, machine)
    techniques = TECHNIQUES + (_OF_MUON if config.train.optimizer == "muon" else ())
    for number, (key, value) in enumerate(techniques):
        change = f"{key}={value}"
        log.info("%s, %d of %d", change, number + 1, len(techniques))
        try:
            changed = load_resolved(source, [*overrides, f"--{key}", value], ranks)
            if changed != config:
                yield _effect(change, changed, machine)
        except ValueError as error:
            yield Effect(change, {}, 0, 0.0, lines_of(error)[0])


def _effect(change: str, config: Config, machine: Machine) -> Effect:
    assert config.model.vocabulary
    runs = simulate(config, config.model.vocabulary, machine)
    found = summary(runs, config, machine)
    received = round(mean_received(runs[0], config.parallel.local_steps))
    return Effect(change, found["memory"]["worst"], received, found["step_time_s"])
