"""Capture of an unmodified torch module as a graph of operations, without data or memory.

torch.export traces the module on fake tensors with a symbolic batch size in dimension 0. The
operations are grouped into *pieces*, which a plan never splits. Every value sent across a stage
boundary has the batch in dimension 0, so that replicas can split it by rows. Therefore:

* An operation whose result has the batch in dimension 0 is a piece of its own.
* Operations that do not depend on the batch (a transposed weight, a mask) are cheap. Every piece
  that reads their results recomputes them. Sizes are computed from the batch size of the stage.
* An operation whose result depends on the batch but does not have it in dimension 0 (a mean), or
  is a tuple, is in the same piece as its readers. Operations that share memory or a buffer are in
  one piece if one of them writes to it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from hpc3d.partition.capturing.flat_export import flat_export, where
from hpc3d.partition.capturing.user_code import described, undisturbed, without_data
from hpc3d.partition.capturing.whole_modules import (
    WholeModule,
    WholeModules,
    culprit,
    place_whole,
)
from hpc3d.partition.factory import made, made_with_data
from hpc3d.runtime import host_memory

_NORMS = (torch.ops.aten.batch_norm, torch.ops.aten.instance_norm)
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class Piece(NamedTuple):
    """Group of operations that is never split across stages.

    `nodes` are the operations of this piece only. `copies` are cheap operations that every piece
    that needs them recomputes. `weights` are the names of the parameters and buffers read by the
    piece. `module` is the path of the submodule that contains the first operation.
    """

    nodes: tuple[fx.Node, ...]
    copies: tuple[fx.Node, ...]
    weights: tuple[str, ...]
    module: str


class Captured(NamedTuple):
    """Captured module, with its pieces in program order.

    `readers` maps each node whose value other pieces read to the indices of these pieces.
    `piece_of` maps a node to the index of its piece.
    """

    program: ExportedProgram
    batch: int
    pieces: list[Piece]
    piece_of: dict[fx.Node, int]
    readers: dict[fx.Node, tuple[int, ...]]
    weights: dict[fx.Node, str]
    inputs: tuple[fx.Node, ...]
    whole: tuple[WholeModule, ...] = ()


def capture(
    module: torch.nn.Module,
    inputs: tuple | dict,
    with_data: Callable[[], tuple[torch.nn.Module, tuple | dict]] | None = None,
) -> Captured:
    """Capture a module that is called with `inputs`, whose dimension 0 is the batch.

    The module is not changed. A submodule that cannot be traced becomes one opaque operation,
    whose behavior is recorded in a run with data. If the tensors have no data, `with_data()`
    returns the module and the inputs for this run.

    Raises ValueError with file and line if the module cannot be captured, for example because its
    control flow depends on data or no input has a batch.
    """
    batch = _batch_of(inputs)
    whole = WholeModules(partial(_example, module, inputs, with_data), batch)
    while True:
        model = module
        try:
            with undisturbed():
                model, like = _emptied(module, inputs)
                whole.stand_in(model)
                program = _program(model, like, batch)
            break
        except (Exception, SystemExit) as error:
            path = error.path if isinstance(error, _SizedByData) else culprit(error, model)
            try:
                whole.add(model, path, _explained(error))
            except ValueError as refused:
                raise ValueError(f"this model cannot be captured: {refused}") from error
    _refuse(program)
    _refuse_trained(program)
    kept = place_whole(program)
    return _pieces(program, batch, _first_names(model))._replace(whole=kept)


def captured_of(name: str) -> Captured:
    """Capture the module that `MODULE:FACTORY` returns."""
    return capture(*made(name), partial(made_with_data, name, 0))


def _program(model, like, batch):
    rows = Dim("batch", min=2)
    shapes = _mapped(like, lambda leaf: {0: rows} if _carries(leaf, batch) else None)
    program = flat_export(model, like, shapes)
    for node in program.graph.nodes:
        for size in (size for tensor in tensors(node.meta.get("val")) for size in tensor.shape):
            if isinstance(size, torch.SymInt) and any(map(_is_unknown, _symbols(size))):
                raise _SizedByData(node)
    return program


class _SizedByData(ValueError):
    """Data-dependent tensor size in the module at `path`."""

    def __init__(self, node):
        what = "the size of a tensor depends on the values of another tensor"
        super().__init__(f"{what}: {node.name}{where(node)}")
        self.path = _module(node)


def _is_unknown(symbol):
    return str(symbol).startswith("u")


def _example(module, inputs, with_data):
    """Return a model with data and a function that calls it with a given number of samples."""
    batch = _batch_of(inputs)
    held = [*module.parameters(), *module.buffers(), *tensors(inputs)]
    if any(isinstance(each, FakeTensor) for each in held):
        _refuse_large(module)
        if with_data is None:
            raise ValueError(
                "a submodule cannot be traced, so a run with data is needed; pass `with_data`"
            )
        module, inputs = with_data()
    else:
        module = copy.deepcopy(module)

    def run(samples):
        rows = torch.arange(samples) % batch
        given = _mapped(inputs, lambda leaf: leaf[rows] if _carries(leaf, batch) else leaf)
        return module(**given) if isinstance(given, dict) else module(*given)

    return module, run


def _refuse_large(module):
    """Raise ValueError if the model with its data does not fit in this machine's memory."""
    needed = sum(each.numel() * each.element_size() for each in module.parameters())
    if needed > _PART_OF_MEMORY * host_memory.total():
        raise ValueError(
            "a submodule cannot be traced, so a run with data is needed, but the model has "
            f"{needed / 1e9:.3g} GB, more than {_PART_OF_MEMORY:.0%} of the memory; use a machine "
            "with more memory"
        )


_PART_OF_MEMORY = 0.5


def _explained(error):
    if isinstance(error, _SizedByData):
        return str(error)
    said = described(error).removeprefix("ValueError: ")
    if "Constraints violated" in said or "specialized" in str(error):
        return "it fixes the batch size, or a size that depends on it; " + said
    if "data-dependent" in said:
        return "its operations depend on the values of tensors; " + said
    return said


def _refuse(program):
    """Raise ValueError for tensors that depend on the batch in two dimensions."""
    for node in program.graph.nodes:
        for tensor in tensors(node.meta.get("val")):
            if sum(isinstance(size, torch.SymInt) for size in tensor.shape) > 1:
                what = "a tensor has the batch in two dimensions, so samples depend on each other"
                raise ValueError(f"{what}: {node.name}{where(node)}")


def _refuse_trained(program):
    """Raise ValueError for operations that write to a parameter."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    nodes = program.graph.nodes
    parameters = [node for node in nodes if kinds.get(node.name) is InputKind.PARAMETER]
    memory = {number for node in parameters for number in _memory(node)}
    for node in nodes:
        if any(memory & _memory(target) for target in written_by(node)):
            what = "the model writes to one of its parameters; make it a buffer"
            raise ValueError(f"{what}: {node.name}{where(node)}")


def _symbols(size):
    return size.node.expr.free_symbols


def _batch_of(inputs):
    for leaf in tensors(inputs):
        if leaf.dim():
            if leaf.shape[0] < 2:
                raise ValueError("the example inputs need a batch of 2 or more in dimension 0")
            return leaf.shape[0]
    raise ValueError("the example inputs need a tensor with the batch in dimension 0")


def _carries(leaf, batch):
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


def _emptied(module, inputs):
    """Return copies of a module and its inputs in which all tensors are fake."""
    with without_data():
        known = {id(each): _empty(each) for part in module.modules() for each in _held(part)}
        return copy.deepcopy(module, known), _mapped(inputs, _empty)


def _held(part):
    """Return a module's own tensors: parameters, buffers and plain attributes."""
    return tensors([*part._parameters.values(), *part._buffers.values(), *vars(part).values()])


def _empty(tensor):
    if not isinstance(tensor, torch.Tensor):
        return tensor
    like = torch.empty(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(like, requires_grad=tensor.requires_grad)
    return like


def _mapped(values, function):
    """Apply `function` to every leaf of tuples, lists and dicts."""
    if isinstance(values, dict):
        return {key: _mapped(value, function) for key, value in values.items()}
    if isinstance(values, tuple | list):
        found = [_mapped(value, function) for value in values]
        named = hasattr(values, "_fields")
        return (
            type(values)(*found) if named else found if isinstance(values, list) else tuple(found)
        )
    return function(values)


def _first_names(module):
    """Return a dict from every name of a parameter or buffer to the first name of the same tensor.

    torch.export uses an arbitrary one of the names.
    """
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _pieces(program: ExportedProgram, batch: int, names: Mapping[str, str]) -> Captured:
    """Group the operations of a program into pieces by the rules in the module docstring.

    `names` maps each name of a weight to its canonical name.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    signature = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    weights = {
        node: names.get(signature[node.name].target, signature[node.name].target)
        for node in placeholders
        if signature[node.name].kind in _WEIGHTS
    }
    inputs = tuple(node for node in placeholders if node not in weights)
    follows = _followers(nodes, inputs) | {n for n in nodes if weights.keys() & {*written_by(n)}}
    joined = _Joined(node for node in nodes if node in follows)
    for node in joined.members:
        if not carries_batch(node):
            for reader in node.users:
                if reader in joined.members:
                    joined.join(node, reader)
    for group in _sharing(program, nodes, weights, joined.members):
        for other in group[1:]:
            joined.join(group[0], other)
    return _ordered(program, batch, nodes, weights, inputs, joined)


def _followers(nodes, inputs):
    """Return the operations whose results depend on the values of the batch, not only on its size.

    They include operations whose results share memory to which such an operation writes.
    """
    follows, memory, before = set(inputs), set(), None
    while before != len(follows):
        before = len(follows)
        for node in nodes:
            reads = any(each in follows for each in node.all_input_nodes)
            if _memory(node) and (reads or memory & _memory(node)):
                follows.add(node)
                for target in written_by(node):
                    _refuse_written(target, node, inputs)
                    memory |= _memory(target)
    return follows


def _memory(node):
    """Return the storage ids of an operation's results."""
    return {each.untyped_storage()._cdata for each in tensors(node.meta.get("val"))}


def _refuse_written(target, node, inputs):
    shared = {number for each in inputs for number in _memory(each)}
    if shared & _memory(target):
        what = "the model writes to one of its inputs; let it write to a copy"
        raise ValueError(f"{what}: {node.name}{where(node)}")


def _is_size(node):
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def tensors(values: Any) -> list[torch.Tensor]:
    """Return all tensors in nested tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values
    return [
        tensor
        for each in (inner if isinstance(values, tuple | list | dict) else ())
        for tensor in tensors(each)
    ]


def outputs_of(captured: Captured) -> list[fx.Node]:
    """Return the distinct outputs of the model that depend on its inputs."""
    (output,) = (node for node in captured.program.graph.nodes if node.op == "output")
    return [node for node in dict.fromkeys(output.all_input_nodes) if node in captured.piece_of]


def loss_of(captured: Captured) -> fx.Node | None:
    """Return the loss: the first output that is a floating-point scalar."""
    for node in outputs_of(captured):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
            return node
    return None


def size_of(size: torch.SymInt | int, batch: int) -> int:
    """Return a possibly symbolic tensor size as an int, for a batch of `batch` samples."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def carries_batch(node: fx.Node) -> bool:
    """Return True if dimension 0 of a node's value is the batch or a multiple of it."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    rows = value.shape[0]
    if not isinstance(rows, torch.SymInt):
        return False
    size = rows.node.expr
    (symbol, *others) = size.free_symbols or (None,)
    return symbol is not None and not others and (size / symbol).is_integer is True


def _sharing(program, nodes, weights, members):
    """Yield groups of operations that must stay together because one of them writes to memory.

    A group contains the operations whose results share the memory, and the readers of these
    results. For a buffer, it contains the operations that read the buffer and all operations of
    the module that owns it.
    """
    memory, written = defaultdict(list), set()
    for node in nodes:
        for value in tensors(node.meta.get("val")):
            memory[value.untyped_storage()._cdata].append(node)
        for target in written_by(node):
            written.add(target)
    for target in written:
        value = target.meta.get("val")
        if target in weights:
            owner = weights[target].rpartition(".")[0]
            used = {node for node in members if target in node.all_input_nodes}
            group = [node for node in members if node in used or _module(node) == owner]
        else:
            group = [n for n in memory[value.untyped_storage()._cdata] if n in members]
            group += [reader for node in group for reader in node.users if reader in members]
        if group:
            yield group


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose values an operation changes in place."""
    if isinstance(node.target, WholeModule):
        _, weights = node.args
        names = zip(node.target.weights, weights, strict=True)
        yield from (weight for name, weight in names if name in node.target.call.written)
        return
    if getattr(node.target, "overloadpacket", None) in _NORMS:  # not declared in their schemas
        *_, mean, variance, in_training = node.args[:6]
        yield from (each for each in (mean, variance) if in_training and each is not None)
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = (
                node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            )
            if isinstance(given, fx.Node):
                yield given


def _module(node):
    """Return the path of the submodule that contains an operation, or "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = [*stack.values()][-1]
    return path.removeprefix("L['self'].").removeprefix("L['self']")


class _Joined:
    """Disjoint sets of nodes."""

    def __init__(self, nodes):
        self.members = {node: node for node in nodes}

    def find(self, node):
        while self.members[node] is not node:
            self.members[node] = node = self.members[self.members[node]]
        return node

    def join(self, one, other):
        self.members[self.find(one)] = self.find(other)


def _ordered(program, batch, nodes, weights, inputs, joined):
    """Return the captured module with one piece per set in `joined`, in program order."""
    groups = defaultdict(list)
    for node in nodes:
        if node in joined.members:
            groups[joined.find(node)].append(node)
    order = {node: number for number, node in enumerate(program.graph.nodes)}
    groups = sorted(groups.values(), key=lambda group: order[group[0]])
    piece_of = {node: piece for piece, group in enumerate(groups) for node in group}
    writers = defaultdict(list)
    for node in nodes:
        for number in {each for target in written_by(node) for each in _memory(target)}:
            writers[number] += [node] if node not in piece_of else []
    pieces = [_piece(group, piece_of, weights, writers, order) for group in groups]
    readers = defaultdict(set)
    for node, piece in piece_of.items():
        for reader in node.users:
            if piece_of.get(reader, piece) != piece:
                readers[node].add(piece_of[reader])
    crossing = {node: tuple(sorted(found)) for node, found in readers.items()}
    return Captured(program, batch, pieces, piece_of, crossing, weights, inputs)


def _piece(group, piece_of, weights, writers, order):
    """Return a set of nodes as a Piece.

    Its copies are all direct and indirect operands that do not depend on model inputs, and the
    operations that write to the memory of these operands.
    """
    copies, todo, names = set(), [*group], {}
    while todo:
        node = todo.pop()
        written = [each for number in _memory(node) for each in writers[number]]
        for source in (*node.all_input_nodes, *(written if node in copies else ())):
            if source in weights:
                names[weights[source]] = None
            elif source not in piece_of and source not in copies and source.op == "call_function":
                copies.add(source)
                todo += [] if _is_size(source) else [source]
    copies = tuple(sorted(copies, key=order.get))
    return Piece(tuple(group), copies, tuple(sorted(names)), _module(group[0]))
