"""Export of a plan as a Python file for torchrun, written by `hpc3d.partition -o PLAN.py`.

The file contains the operations of each model chunk as source code. Under torchrun, it trains the
chunks as stages of torch.distributed.pipelining. It does not import hpc3d. It consists of

    hpc3d.partition.execution.torchrun_loop    copied without its module docstring
    class Part0(ModelPart): ...                a chunk: def forward(self, received ..., inputs)
    def border_1(rows): ...                    tensors received by chunk 1, for `rows` samples
    CUT = CutModel(...)                        description of the model, passed to main(CUT)
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_unflatten
from torch.utils._sympy.printers import PythonPrinter

from hpc3d.config.rules import refuse
from hpc3d.partition.capture import Captured, carries_batch, state_of
from hpc3d.partition.execution import torchrun_loop
from hpc3d.partition.execution.stage_program import StageProgram
from hpc3d.partition.execution.staged_model import StagedModel, staged_model
from hpc3d.partition.plan_file import SavedPlan

SCHEDULES = {
    "none": "ScheduleGPipe",
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}
_MOST_NUMBERS = 10_000  # maximum number of elements of a constant in the file
_KNOWN = {
    "torch",
    "device",
    "inf",
    "nan",
    "NoneType",
    "fx_pytree",
    "pytree",
}  # names in code by fx


def torchrun_file(plan: SavedPlan, captured: Captured) -> str:
    """Return the content of the Python file for a plan of a captured model.

    Raises ValueError for features that torch.distributed.pipelining does not support: stages with
    different numbers of replicas, sharded moments, unequal microbatches, and other schedules.
    """
    refuse([*_wrong(plan, captured)])
    pieces = plan.pieces(captured)
    model = staged_model(captured, pieces, plan.replicas, plan.recompute, redraw=False)
    own = [*_parts(plan, model), *_borders(model), _make(plan.model), _named(model)]
    own += [_cut(plan, model), 'if __name__ == "__main__":\n    main(CUT)']
    numbers = {*re.findall(r"\b(?:inf|nan)\b", "\n".join(own))}
    imports = [f"from math import {', '.join(sorted(numbers))}"] if numbers else []
    source = inspect.getsource(torchrun_loop)
    docstring = ast.parse(source).body[0]
    loop = "".join(source.splitlines(keepends=True)[docstring.end_lineno :])
    texts = [_head(plan), loop, *imports, *own]
    return "\n\n\n".join(text.strip("\n") for text in texts) + "\n"


def _wrong(plan: SavedPlan, captured: Captured) -> Iterator[str]:
    """Yield one error message for each opaque module, which has no source code, and for each
    property of a plan that cannot be exported."""
    for path in dict.fromkeys(each.path for each in captured.whole):
        yield f"{path}: cannot be traced, so its source cannot be written; write PLAN.json"
    stages, micros, replicas = len(plan.replicas), plan.microbatches, plan.replicas[0]
    here = "torch.distributed.pipelining"
    if plan.schedule not in SCHEDULES:
        yield f"schedule {plan.schedule}: not supported by {here}; use 1f1b, gpipe or interleaved"
    if len({*plan.replicas}) > 1:
        counts = " ".join(map(str, plan.replicas))
        yield f"replicas {counts}: must be equal for {here}; use --replicas {replicas}"
    if plan.zero and replicas > 1:
        yield f"zero = {plan.zero}: {here} does not shard optimizer moments; use --zero 0"
    if plan.batch % (micros * replicas):
        yield (
            f"a batch of {plan.batch} samples must be divisible by {micros} microbatches x "
            f"{replicas} replicas for {here}; change --batch, --microbatches or --replicas"
        )
    if plan.schedule == "1f1b" and 1 < micros < stages:
        yield (
            f"{micros} microbatches are too few for Schedule1F1B of {here} on {stages} stages; "
            f"use --microbatches {stages} or --schedule gpipe"
        )
    if plan.schedule == "interleaved" and micros % max(1, micros // stages):
        yield (
            f"{micros} microbatches must divide into {micros // stages} equal groups for "
            f"ScheduleInterleaved1F1B of {here}; use --microbatches {stages}"
        )


def _head(plan):
    stages, replicas = len(plan.replicas), plan.replicas[0]
    counts = f"stages {stages}, replicas {replicas}, microbatches {plan.microbatches}"
    module, _, _ = plan.model.partition(":")
    return f'''\
"""{plan.model} on {plan.ranks} processes: {counts}, schedule {plan.schedule}.

    torchrun --nproc-per-node {plan.ranks} THIS_FILE --steps 10

Written by python -m hpc3d.partition -o with torch {torch.__version__}, for steps of
{plan.batch} samples.  It needs torch, and {module} for the initial weights
and the inputs: every process creates the full model once.  Dropout uses torch's generator.
"""'''


def _parts(plan: SavedPlan, model: StagedModel) -> Iterator[str]:
    """Yield, for each model chunk, the source code of a class."""
    last = len(model.programs) - 1
    for number, program in enumerate(model.programs):
        names, nodes = plan.parts[number], program.module.graph.nodes
        count = sum(node.op == "call_function" for node in nodes)
        output = model.loss if number == last else None
        forward = _PartSource(program, output).text()
        yield f'''\
class Part{number}(ModelPart):
    """From {names[0]} to {names[-1]}: {count} operations."""

    reads_weights = {_tuple_of(program.weights)}
    writes_buffers = {_tuple_of(program.written)}

{forward}'''


def _tuple_of(names):
    """Return the source of a tuple of strings, one per line if there are several."""
    if len(names) < 2:
        return repr(tuple(names))
    return "(\n" + "".join(f"        {name!r},\n" for name in names) + "    )"


class _PartSource:
    """Converter from the graph of a model chunk to the source code of its forward method.

    Weights become attributes of the class. Sizes and the device are taken from a tensor with a
    batch dimension.
    """

    def __init__(self, program: StageProgram, loss: fx.Node | None) -> None:
        self.program, self.loss, self.graph = program, loss, program.module.graph
        _, *given = [node for node in self.graph.nodes if node.op == "placeholder"]
        left = iter(given)
        self.sizes = [next(left) for _ in program.sizes]
        self.received = [next(left) for _ in program.received]
        self.inputs = [next(left) for _ in program.inputs]
        self.weights = [*left]
        self.graph.owning_module = None

    def text(self) -> str:
        """Return the indented source code of the forward method."""
        rows, where, inputs = map(self._named, ("rows", "device", "inputs"))
        self._place_weights()
        self._place_device(where)
        counts = zip(self.sizes, self.program.sizes, strict=True)
        sizes = [f"{node} = {_size(size, rows.name)}" for node, size in counts if node.users]
        tensor = None
        if sizes or where.users:
            tensor, times = self._with_batch()
        arguments = ", ".join(["self", *(node.name for node in self.received), f"{inputs}=None"])
        head = [f"def forward({arguments}):", *self._inputs_read(inputs, tensor)]
        if sizes:
            head.append(f"{rows} = {tensor}.shape[0]" + (f" // {times}" if times > 1 else ""))
        if where.users:
            head.append(f"{where} = {tensor}.device")
        self.graph.set_codegen(_Method("\n    ".join(head + sizes), self._result()))
        code = self.graph.python_code("self")
        if unknown := code.globals.keys() - _KNOWN:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"the source of {names} cannot be written; write PLAN.json")
        return "".join(f"    {line}\n" for line in code.src.strip().splitlines())

    def _named(self, name):
        """Add a placeholder to the graph with this name, or a similar name if it is taken."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.placeholder(name)
        node.target = node.name
        return node

    def _place_weights(self):
        for node, name in zip(self.weights, self.program.weights, strict=True):
            if node.users:
                order = {each: number for number, each in enumerate(self.graph.nodes)}
                with self.graph.inserting_before(min(node.users, key=order.get)):
                    node.replace_all_uses_with(self.graph.get_attr(name))

    def _place_device(self, where):
        def placed(each):
            return where if isinstance(each, torch.device) else each

        for node in self.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, placed)
            node.kwargs = fx.node.map_aggregate(node.kwargs, placed)

    def _inputs_read(self, inputs, also):
        """Yield a line of source code for each input that is used, including the input `also`."""
        for node, original in zip(self.inputs, self.program.inputs, strict=True):
            if node.users or node is also:
                row = "" if carries_batch(original) else "[0]"
                yield f'{node} = {inputs}["{original.name}"]{row}'

    def _with_batch(self):
        """Return a tensor with the batch in dimension 0, and its number of rows per sample."""
        program = self.program
        given = zip(self.received + self.inputs, program.received + program.inputs, strict=True)
        for node, original in given:
            if carries_batch(original):
                size = original.meta["val"].shape[0].node.expr
                return node, int(size.subs(dict.fromkeys(size.free_symbols, 1)))
        raise ValueError(f"a part reads no tensor with a batch dimension: {self.program.weights}")

    def _result(self):
        made = self.graph.output_node().args[0]
        if self.loss is None:
            sent = [f"{node}.contiguous()" for node in made[: len(self.program.sent)]]
            return f"return ({', '.join(sent)}{',' if len(sent) == 1 else ''})"
        return f"return {made[len(self.program.sent) + self.program.outputs.index(self.loss)]}"


class _Method(CodeGen):
    """Code generator of torch.fx for a function with a given head and return statement."""

    def __init__(self, head, last):
        super().__init__()
        self.head, self.last = head, last

    def gen_fn_def(self, free_vars, maybe_return_annotation, **how):
        return self.head

    def generate_output(self, output_args, **how):
        return self.last


def _size(size: torch.SymInt | int, rows: str) -> str:
    """Return the source code of a size; `rows` is the variable with the number of samples."""
    if isinstance(size, int):
        return str(size)
    text = PythonPrinter().doprint(size.node.expr)
    for symbol in size.node.expr.free_symbols:
        text = re.sub(rf"\b{symbol}\b", rows, text)
    return text


def _borders(model: StagedModel) -> Iterator[str]:
    """Yield, for each chunk boundary, the source code of a function that returns its tensors."""
    for number, program in enumerate(model.programs[1:], 1):
        lines = ""
        for node in program.received:
            value, graded = node.meta["val"], node in model.graded
            shape = ", ".join(_size(size, "rows") for size in value.shape)
            lines += f"        crossing([{shape}], {value.dtype}, graded={graded}),\n"
        names = ", ".join(node.name for node in program.received)
        yield (
            f"def border_{number}(rows):\n"
            f'    """Return {names} of part {number}, without data."""\n'
            f"    return [\n{lines}    ]"
        )


def _make(model):
    """Return the source code of the function that calls the user's factory."""
    module, _, call = model.partition(":")
    call = call.strip() if "(" in call else f"{call.strip()}()"
    return f'''\
def make():
    """Return the model with its initial weights, and the inputs of a step."""
    return import_module({module!r}).{call}'''


def _named(model: StagedModel) -> str:
    """Return the source code of the function that assigns names to the factory's inputs."""
    captured = model.captured
    spec, count = captured.program.call_spec.in_spec, len(captured.inputs)
    by_position, by_name = tree_unflatten([*range(count)], spec)
    paths = dict(_paths(by_name or by_position, "inputs"))
    needed = {node for program in model.programs for node in program.inputs}
    lines = "".join(
        f'        "{node.name}": {paths[number]},\n'
        for number, node in enumerate(captured.inputs)
        if node in needed
    )
    docstring = '"""Return the inputs by the names that the parts use."""'
    return f"def named(inputs):\n    {docstring}\n    return {{\n{lines}    }}"


def _paths(values: Any, path: str) -> Iterator[tuple[int, str]]:
    """Yield (leaf, source code to access the leaf) for each leaf of nested tuples and dicts."""
    if isinstance(values, int):
        yield values, path
        return
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in pairs:
        yield from _paths(value, f"{path}[{key!r}]")


def _cut(plan: SavedPlan, model: StagedModel) -> str:
    needed = {node: None for program in model.programs for node in program.inputs}
    undivided = [node.name for node in needed if not carries_batch(node)]
    parts = range(len(model.programs))
    # With one microbatch and one chunk per stage, all schedules are identical.
    schedule = "gpipe" if plan.chunks == plan.microbatches == 1 else plan.schedule
    return f"""\
CUT = CutModel(
    make=make,
    named=named,
    undivided={undivided},
    parts=[{", ".join(f"Part{number}" for number in parts)}],
    borders=[{", ".join(f"border_{number}" for number in parts[1:])}],
    recompute={[*model.recompute]},
    constants={{{", ".join(_constants(model))}}},
    stages={len(plan.replicas)},
    replicas={plan.replicas[0]},
    microbatches={plan.microbatches},
    schedule=dist.pipelining.{SCHEDULES[schedule]},
)"""


def _constants(model: StagedModel) -> Iterator[str]:
    """Yield the source code of dict items for the constants that the model creates itself.

    Constants that are attributes of the model are skipped, because the file reads them from the
    model.
    """
    names = {name for program in model.programs for name in program.weights}
    captured = model.captured
    for name, value in state_of(captured).items():
        made_here = name in names and name in captured.program.constants
        if made_here and type(value) is torch.Tensor:
            if value.numel() > _MOST_NUMBERS:
                raise ValueError(
                    f"{name}: a constant of {value.numel()} numbers is too large to write; "
                    "make it a buffer of the model"
                )
            yield f"{name!r}: torch.tensor({value.tolist()}, dtype={value.dtype})"
