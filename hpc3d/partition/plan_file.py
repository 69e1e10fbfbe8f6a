"""JSON plan file, written by `hpc3d.partition -o` and executed by `hpc3d.partition run`.

A plan is valid for a single model. The file contains the SHA-256 of the graph captured by
torch.export, so that a model with a different computation is rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from hpc3d.config.limits import INT32, MOST_PASSES, MOST_RANKS, TRAINED_TYPES
from hpc3d.console import small_files
from hpc3d.partition.capture import Captured
from hpc3d.partition.module_plan import ModulePlan
from hpc3d.pipeline.schedule import ONE_STAGE, SCHEDULES

_VERSION = 1
_REMEDY = "use a file written by python -m hpc3d.partition -o"


class SavedPlan(NamedTuple):
    """Plan of the model `model` (MODULE:FACTORY) for steps of `batch` samples.

    `graph` is the SHA-256 of the model's graph. `replicas` has one number per pipeline stage, and
    each replica consists of `tensor` tensor-parallel ranks.
    `parts` lists the names of the pieces in each model chunk, in model order, and `recompute` is
    True for each chunk with recomputation. `predicted` records the machine, the device on which
    the costs were measured, and the predicted times in seconds and sizes in bytes. `offload` lists
    the offloaded data, as in `parallel.offload`. The module and its inputs are converted to
    `dtype`. Both are `None` in plans of earlier versions.
    """

    model: str
    graph: str
    batch: int
    microbatches: int
    schedule: str
    chunks: int
    zero: int
    replicas: list[int]
    recompute: list[bool]
    parts: list[list[str]]
    predicted: dict[str, Any]
    offload: list[str] | None = None
    dtype: str | None = None
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * sum(self.replicas)

    def text(self) -> str:
        """Return the content of the plan file."""
        return text_of("plan", self._asdict())

    def pieces(self, captured: Captured) -> list[list[int]]:
        """Return the piece indices of each chunk; raise ValueError if the model has changed."""
        if digest_of(captured) != self.graph:
            raise ValueError(
                f"{self.model} or the version of torch has changed since the plan was made; make "
                "a new plan"
            )
        numbers = {name: number for number, name in enumerate(names_of(captured))}
        if sorted(name for part in self.parts for name in part) != sorted(numbers):
            raise ValueError(
                "the plan does not contain the same pieces as the model; make a new plan"
            )
        return [[numbers[name] for name in part] for part in self.parts]


def saved(
    plan: ModulePlan,
    captured: Captured,
    model: str,
    machine: str,
    dtype: str | None = None,
    device: str | None = None,
) -> SavedPlan:
    """Convert a plan to a `SavedPlan` that records the names of the model and the machine.

    `dtype` is the data type to which the module was converted, or `None`. `device` is the device
    on which the costs were measured, or `None`.
    """
    choice, step, names = plan.choice, plan.step, names_of(captured)
    return SavedPlan(
        model=model,
        graph=digest_of(captured),
        batch=plan.costs.batch,
        microbatches=choice.microbatches,
        schedule=choice.schedule if choice.width > 1 else ONE_STAGE,
        chunks=choice.chunks,
        zero=choice.zero,
        replicas=[*choice.replicas],
        recompute=[stage.recompute for stage in choice.stages],
        parts=[[names[piece] for piece in part] for part in plan.pieces],
        predicted={
            "machine": machine,
            "device": device,
            "memory": plan.memory,
            "seconds": step.seconds,
            "forward": step.forward,
            "backward": step.backward,
            "sums": step.sums,
            "held": step.held,
            "sent": step.sent,
        },
        offload=plan.offload,
        dtype=dtype,
        tensor=plan.costs.ways,
    )


def names_of(captured: Captured) -> list[str]:
    """Return the piece names used in plan files; a piece is named after its first operation."""
    return [piece.nodes[0].name for piece in captured.pieces]


def digest_of(captured: Captured) -> str:
    """Return a SHA-256 hash of a model's computation that is independent of the batch size.

    The hash covers the operations with their operands, and the shapes and dtypes of all values.
    """
    lines, nodes = [], captured.program.graph.nodes
    for node in nodes:
        name = captured.weights.get(node, node.name)
        operands = [captured.weights.get(each, each.name) for each in node.all_input_nodes]
        given = [_constants(node.args), _constants(node.kwargs)]
        what = "" if node.op == "placeholder" else str(node.target)
        lines.append(repr((name, what, operands, given, _described(node.meta.get("val")))))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _constants(value):
    return fx.node.map_arg(value, lambda node: None)


def _described(value):
    """Describe the dtypes and shapes of the tensors in a value; b stands for the batch size."""
    if isinstance(value, torch.Tensor):
        shape = [_described(size) for size in value.shape]
        return str(value.dtype), value.requires_grad, shape
    if isinstance(value, tuple | list):
        return [_described(each) for each in value]
    text = str(value)
    for symbol in value.node.expr.free_symbols if isinstance(value, torch.SymInt) else ():
        text = text.replace(str(symbol), "b")
    return text


def load(path: Path | str) -> SavedPlan:
    """Read a plan file; raise ValueError with a one-line message if the file is invalid."""
    plan = SavedPlan(**fields_of(path, "plan", _SOUND, _REMEDY, SavedPlan._field_defaults))
    if {len(plan.parts), len(plan.recompute)} != {len(plan.replicas) * plan.chunks}:
        raise ValueError(
            f"{path}: chunks, replicas, recompute and parts are inconsistent; {_REMEDY}"
        )
    return plan


def text_of(kind: str, fields: Mapping[str, Any]) -> str:
    """Return the content of a JSON file that can be read by `fields_of`."""
    return json.dumps({"format": f"hpc3d-{kind}", "version": _VERSION, **fields}) + "\n"


def fields_of(
    path: Path | str,
    kind: str,
    rules: Mapping[str, Callable[[Any], bool]],
    remedy: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Read the fields of a JSON file of a given `kind`, "plan" or "profile".

    `defaults` contains the values of fields that older files do not have. Raises ValueError with a
    one-line message that ends with the `remedy` if the file is invalid or one of the `rules`
    returns False for the corresponding field.
    """
    content = small_files.read(path, small_files.MOST_JSON, remedy)
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: not valid JSON; {remedy}") from None
    known = isinstance(tree, dict) and (tree.get("format"), tree.get("version"))
    if known != (f"hpc3d-{kind}", _VERSION):
        raise ValueError(f"{path} is not a {kind} of this version of hpc3d; {remedy}")
    tree = {**defaults, **tree}
    for field, sound in rules.items():
        if not sound(tree.get(field)):
            raise ValueError(f"{path}: {field} is missing or invalid; {remedy}")
    return {field: tree.get(field) for field in rules}


def whole(least: int, most: int) -> Callable[[Any], bool]:
    """Return a rule that accepts an integer from `least` to `most`."""
    return lambda value: type(value) is int and least <= value <= most


def _text(value):
    return isinstance(value, str) and 0 < len(value) < _LONGEST and "\0" not in value


def list_of(sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a rule that accepts a non-empty list whose items all satisfy the rule `sound`."""
    return lambda value: isinstance(value, list) and bool(value) and all(map(sound, value))


_LONGEST = 10_000  # maximum number of characters in a name
_SOUND = {
    "model": _text,
    "graph": _text,
    "batch": whole(1, INT32),
    "microbatches": whole(1, MOST_PASSES),
    "schedule": lambda value: isinstance(value, str) and value in SCHEDULES,
    "chunks": whole(1, MOST_RANKS),
    "zero": whole(0, 1),
    "replicas": list_of(whole(1, MOST_RANKS)),
    "recompute": list_of(lambda value: isinstance(value, bool)),
    "parts": list_of(list_of(_text)),
    "predicted": lambda value: isinstance(value, dict),
    "offload": lambda value: value in (None, [], ["optimizer"]),
    "dtype": lambda value: value is None or value in TRAINED_TYPES,
    "tensor": whole(1, MOST_RANKS),
}
