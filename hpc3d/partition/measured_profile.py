"""Profile file written by `hpc3d.partition profile`, and plan costs derived from the profile.

A piece is a group of operations that is never split across stages. Its time is interpolated
linearly between the measured numbers of samples per microbatch. Beyond the largest measured
number, the time is assumed to be proportional to the number of samples. The same applies to the
workspace of a piece, which is measured only on GPUs. Otherwise, memory and communication volumes
do not depend on the profile.
"""

from __future__ import annotations

from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.config.limits import INT32, MOST_RANKS
from hpc3d.partition.capture import Captured
from hpc3d.partition.evaluation import RunCosts
from hpc3d.partition.operation_costs import OperationCost, Operations
from hpc3d.partition.plan_file import (
    digest_of,
    fields_of,
    list_of,
    names_of,
    text_of,
    whole,
)
from hpc3d.predict.machine.machine import TYPES, CallTable, Link, Machine, Rates

_REMEDY = "use a file written by python -m hpc3d.partition profile"
_ONE_NODE = 4096  # ranks per node, large enough to place all ranks on one node

# Fictitious machine that takes one second per FLOP and per byte. It is used only to compute the
# fraction of the backward time that is spent on weight gradients.
UNIT = Machine(
    "unit",
    "one second per FLOP and per byte",
    ranks_per_node=1,
    cores=0,
    memory_gb=1.0,
    memory_bandwidth=1.0,
    launch_s=0.0,
    gemm=dict.fromkeys(TYPES, Rates(1.0, (1.0,), (1.0,))),
    links=(Link(0, 0.0, 1.0),),
)


class ModuleProfile(NamedTuple):
    """Measurements of the model `model` (MODULE:FACTORY).

    `graph` is the SHA-256 of the model's graph. All `ranks` ranks ran at the same time, on a
    machine with `cores` cores. `pieces` maps the name of a piece to two lists: the forward and the
    backward times of the piece in seconds, for each number of rows per microbatch in `rows`. On a
    GPU, the third list contains the workspace of the piece in bytes. `run` has the fields of
    RunCosts, and each entry of `calls` has fields of a CallTable. `memory` is in bytes per rank,
    and `host` describes the machine. `device` is the name of the GPU, or "CPU"; it is `None` in
    profiles of earlier versions.
    """

    model: str
    graph: str
    host: str
    ranks: int
    cores: int
    memory: float
    rows: list[int]
    pieces: dict[str, list[list[float]]]
    run: dict[str, float]
    calls: list[dict[str, Any]]
    device: str | None = None

    def text(self) -> str:
        """Return the content of the profile file."""
        return text_of("profile", self._asdict())

    def machine(self, ranks: int) -> Machine:
        """Return a machine description based on the measured times, for plans with `ranks` ranks.

        Raises ValueError if `ranks` is greater than 1 and the profile has no message times.
        """
        if ranks > 1 and not self.calls:
            raise ValueError(
                "the profile was measured on one rank and has no message times; measure it with "
                "mpirun -np 2, or add --machine"
            )
        tables = [
            CallTable(
                op=each["op"],
                members=each["members"],
                groups="alone",
                stride=0,
                bytes=tuple(each["bytes"]),
                seconds=tuple(each["seconds"]),
            )
            for each in self.calls
        ]
        return Machine(
            "measured",
            self.host,
            ranks_per_node=_ONE_NODE,
            cores=self.cores,
            memory_gb=self.memory / 1e9,
            memory_bandwidth=inf,
            launch_s=0.0,
            gemm={},
            links=(_link_of(tables),),
            measured=tuple(tables),
        )

    def operations(self, captured: Captured) -> MeasuredOperations:
        """Return the operations of a captured module with their measured times.

        Raises ValueError if the profile was measured for another model.
        """
        if digest_of(captured) != self.graph:
            raise ValueError(
                f"{self.model}, its data type or the version of torch has changed since the "
                "measurement; use the same --dtype, or run partition profile again"
            )
        if {*names_of(captured)} != {*self.pieces}:
            raise ValueError(
                "the profile does not contain the same pieces as the model; run partition profile "
                "again"
            )
        return MeasuredOperations(captured, self)


def _link_of(tables):
    """Fit latency and bandwidth to the measured messages, to predict unmeasured calls."""
    for table in tables:
        if table.op == "send":
            more = table.bytes[-1] - table.bytes[0], table.seconds[-1] - table.seconds[0]
            return Link(0, table.seconds[0], more[0] / more[1] if more[1] > 0 else inf)
    return Link(0, 0.0, inf)


class MeasuredOperations(Operations):
    """Operations of a captured module, with the times measured for its pieces."""

    def __init__(self, captured: Captured, profile: ModuleProfile) -> None:
        super().__init__(captured)
        self.run, self.rows = profile.run, np.array(profile.rows)
        values = [profile.pieces[name] for name in names_of(captured)]
        self.values = np.array(values)  # [piece, quantity, rows]

    @cached_property
    def weight(self) -> list[float]:
        """Fraction of each piece's backward time that is spent on weight gradients."""
        found = super().costs(UNIT, int(self.rows[0]))
        return [_weight(found[node] for node in each.nodes) for each in self.captured.pieces]

    def costs(self, machine: Machine, batch: int) -> dict:
        """Return the costs per operation, with the values of a piece in its first operation."""
        found = {
            node: each._replace(forward=0.0, backward=0.0, weight=0.0)
            for node, each in super().costs(UNIT, batch).items()
        }
        measured = zip(self.captured.pieces, self.at(batch).tolist(), self.weight, strict=True)
        for piece, (forward, backward, *workspace), share in measured:
            first, known = piece.nodes[0], [found[node] for node in piece.nodes if node in found]
            working = max((each.working for each in known), default=0.0)
            found[first] = found.get(first, OperationCost())._replace(
                forward=forward,
                backward=backward,
                weight=share * backward,
                working=sum(workspace, start=working),
            )
        return found

    def at(self, rows: int) -> np.ndarray:
        """Return the predicted values for `rows` rows, as an array [piece, quantity]."""
        known, last = self.rows, self.rows[-1]
        if rows >= last:
            return self.values[..., -1] * (rows / last)
        index = int(np.searchsorted(known, rows, "right"))
        low, high = known[index - 1], known[index]
        way = (rows - low) / (high - low)
        return (1 - way) * self.values[..., index - 1] + way * self.values[..., index]


def _weight(costs):
    backward, weight = map(sum, zip(*((each.backward, each.weight) for each in costs)))
    return weight / backward if backward else 0.0


def operations_of(captured: Captured, profile: ModuleProfile | None) -> Operations:
    """Return the operations of a captured module, with measured times if there is a profile."""
    return profile.operations(captured) if profile else Operations(captured)


def load(path: Path | str) -> ModuleProfile:
    """Read a profile file; raise ValueError with a one-line message if the file is invalid."""
    defaults = ModuleProfile._field_defaults
    profile = ModuleProfile(**fields_of(path, "profile", _SOUND, _REMEDY, defaults))
    size = len(profile.rows)
    if any(len(times) != size for each in profile.pieces.values() for times in each):
        raise ValueError(
            f"{path}: every piece must have one value for each entry of `rows`; {_REMEDY}"
        )
    return profile


def _seconds(value):
    return type(value) in (int, float) and isfinite(value) and value >= 0


def _positive(value):
    return _seconds(value) and value > 0


def _text(value):
    return isinstance(value, str)


def _ascending(sound):
    return lambda value: list_of(sound)(value) and value == sorted({*value})


def _pieces(value):
    lists = list_of(lambda values: isinstance(values, list) and all(map(_seconds, values)))
    return (
        isinstance(value, dict)
        and all(map(lists, value.values()))
        and {*map(len, value.values())} in ({2}, {3})
    )


def _call(value):
    return (
        isinstance(value, dict)
        and _text(value.get("op"))
        and whole(1, MOST_RANKS)(value.get("members"))
        and _ascending(_positive)(value.get("bytes"))
        and isinstance(value.get("seconds"), list)
        and all(map(_positive, value["seconds"]))
        and len(value["seconds"]) == len(value["bytes"]) > 1
    )


_SOUND = {
    "model": _text,
    "graph": _text,
    "host": _text,
    "ranks": whole(1, MOST_RANKS),
    "cores": whole(1, MOST_RANKS),
    "memory": _positive,
    "rows": lambda value: _ascending(whole(1, INT32))(value) and value[0] == 1,
    "pieces": _pieces,
    "run": lambda value: (
        isinstance(value, dict)
        and {*value} == {*RunCosts._fields}
        and all(map(_seconds, value.values()))
    ),
    "calls": lambda value: isinstance(value, list) and all(map(_call, value)),
    "device": lambda value: value is None or _text(value),
}
