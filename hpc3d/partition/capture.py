"""Capture an unmodified torch module as a graph of operations, without allocating its tensors.

torch.export traces the module on fake tensors with a symbolic batch size in dimension 0. The
operations are grouped into *pieces*, which are never split across stages. Every value sent across
a stage boundary has the batch in dimension 0, so that replicas can split the value by rows.
Therefore:

* An operation whose result has the batch in dimension 0 is a piece of its own.
* Operations that do not depend on the batch (a transposed weight, a mask) are cheap. Every piece
  that reads their results recomputes them. Each stage computes tensor sizes from the number of
  samples in its microbatch.
* An operation whose result depends on the batch, but does not have the batch in dimension 0 (such
  as a mean), is in the same piece as all readers of the result. The same applies to an operation
  that returns a tuple. Operations on the same memory or buffer are in one piece if one of them
  writes to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from networkx.utils import UnionFind
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from hpc3d.partition.capturing.flat_export import FixedBatch, module_of, where
from hpc3d.partition.capturing.gradient_hooks import refuse_gradient_hooks
from hpc3d.partition.capturing.mean_loss import refuse_other_losses
from hpc3d.partition.capturing.named_outputs import output_name
from hpc3d.partition.capturing.opaque_modules import OpaqueModule, replace_placeholders
from hpc3d.partition.capturing.sample_layout import SampleLayouts, arguments_of
from hpc3d.partition.capturing.sample_relations import (
    BatchValues,
    RelatedSamples,
    refuse_related_samples,
)
from hpc3d.partition.capturing.tracing import (
    WithData,
    batch_of,
    independent_inputs,
    inputs_with_later_batch,
    traced,
)
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.partition.capturing.user_module import (
    attribute_tensors,
    first_names,
    refuse_unsupported,
    unwrapped,
)
from hpc3d.partition.factory import made_model, made_with_data

_NORMS = (torch.ops.aten.batch_norm, torch.ops.aten.instance_norm)
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class Piece(NamedTuple):
    """Group of operations that is never split across stages.

    `nodes` are the operations that belong to this piece only. `copies` are cheap operations that
    are duplicated in every piece that reads their results. `weights` contains the names of the
    parameters and buffers read by the piece; the first piece also holds all parameters and buffers
    that no piece reads. `module` is the path of the submodule that contains the first operation.
    """

    nodes: tuple[fx.Node, ...]
    copies: tuple[fx.Node, ...]
    weights: tuple[str, ...]
    module: str


class Loss(NamedTuple):
    """Output of a model that is minimized.

    `node` is `None` if the model has no loss. `text` describes the output, or explains why there
    is no loss. `name` is the name of the output in NamedOutputs. `reduction` is "mean" or "sum"
    if the user states how the loss is computed from the losses of the samples, otherwise "".
    """

    node: fx.Node | None
    text: str
    name: str = ""
    reduction: str = ""


class Captured(NamedTuple):
    """Captured module, with its pieces in program order.

    `readers` maps each node whose value is read by other pieces to the indices of those pieces.
    `piece_of` maps a node to the index of its piece. `attributes` maps the name of a constant to
    the path of the module's attribute that contains the value. `batch` is the batch size of the
    example inputs, `weights` maps input nodes of the graph to the names of parameters, buffers and
    constants, and `opaque` contains the opaque operations. `changing` contains the names of the
    weights that a training step changes, if the module is captured in evaluation mode.
    """

    program: ExportedProgram
    batch: int
    pieces: list[Piece]
    piece_of: dict[fx.Node, int]
    readers: dict[fx.Node, tuple[int, ...]]
    weights: dict[fx.Node, str]
    inputs: tuple[fx.Node, ...]
    opaque: tuple[OpaqueModule, ...] = ()
    attributes: Mapping[str, str] = MappingProxyType({})
    loss: Loss = Loss(None, "")
    changing: Collection[str] = ()


def capture(
    module: torch.nn.Module,
    inputs: tuple | dict,
    with_data: WithData | None = None,
    unsplit: Collection[int] = (),
) -> Captured:
    """Capture a module that is called with `inputs`, whose dimension 0 is the batch.

    The batch size is the number of rows of the first input. Every input with this number of rows
    is split with the batch, unless its index in the flattened inputs is in `unsplit`.

    The module is not changed. A submodule that cannot be traced becomes one opaque operation,
    whose shapes and costs are recorded in a run on real data. If the given tensors have no data,
    `with_data()` must return the module and the inputs for this run. Raises ValueError with the
    user's file and line if the module cannot be captured, for example because its control flow
    depends on data or no input has a batch dimension.
    """
    module = unwrapped(module)
    refuse_unsupported(module)
    refuse_gradient_hooks(module)
    program, model, outputs = traced(module, inputs, with_data, unsplit)
    _refuse_unsupported(program)
    attributes = _attributes(program, model)
    operations = replace_placeholders(program)
    captured = _pieces(program, batch_of(inputs), first_names(model))
    loss = _loss(captured, outputs)
    _freeze(program, outputs.trained(None if loss.node is None else outputs.loss()))
    return captured._replace(opaque=operations, attributes=attributes, loss=loss)


def captured_of(name: str, dtype: str | None = None) -> Captured:
    """Capture the module returned by the factory `name`, given as `MODULE:FACTORY`, for training.

    If a `dtype` is given, the module and its floating-point inputs are converted to it. Raises
    ValueError as `captured_by_sample` does.
    """
    module, inputs, reduction = made_model(name, dtype)
    with_data = partial(made_with_data, name, 0, dtype)
    return captured_by_sample(module, inputs, with_data, reduction)


def captured_by_sample(
    module: torch.nn.Module,
    inputs: tuple | dict,
    with_data: WithData,
    reduction: str = "",
) -> Captured:
    """Capture a module that can be trained in microbatches.

    `reduction` is the reduction of the loss that the factory states, or "". The other arguments
    are those of `capture`. Raises ValueError if the module cannot be captured, if the result for
    one sample depends on other samples, or if the loss is not a mean over the samples.
    """

    def captured(unsplit=()):
        found = capture(module, inputs, with_data, unsplit)
        return checked(found._replace(loss=found.loss._replace(reduction=reduction)))

    try:
        return captured()
    except ValueError as error:
        # By chance, an input such as a table may have as many rows as the batch.
        if unsplit := independent_inputs(module, inputs):
            with suppress(ValueError):
                return captured(unsplit)
        fixed = isinstance(error, RelatedSamples) or isinstance(error.__cause__, FixedBatch)
        if fixed and (names := ", ".join(inputs_with_later_batch(module, inputs))):
            raise ValueError(
                f"{error}; if the batch is dimension 1 of {names}, wrap the model in a module "
                "that transposes this input, because dimension 0 must be the batch"
            ) from error
        raise


def checked(captured: Captured) -> Captured:
    """Return a captured module if it can be trained in microbatches.

    Raises ValueError if the loss is known not to be a mean over per-sample losses, unless the user
    states its reduction. A module without a loss is rejected if any operation other than such a
    mean combines different samples.
    """
    program, loss = captured.program, loss_of(captured)
    values = BatchValues(program, loss)
    refuse_related_samples(values, SampleLayouts(program.graph))
    if loss is not None and not captured.loss.reduction:
        refuse_other_losses(values, loss)
    return captured


def updated_by_microbatches(captured: Captured, read: Collection[str] = ()) -> list[str]:
    """Return the names of modified buffers on which the loss depends, or that are in `read`.

    `read` contains the names of weights that evaluation reads. The running statistics of norms are
    not included.
    """
    relevant = BatchValues(captured.program, captured.loss.node).relevant
    memory, others = map(modified_memory, (relevant, captured.program.graph.nodes))
    return [
        name
        for node, name in captured.weights.items()
        if (others if name in read else memory) & memory_of(node)
    ]


def modified_memory(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the identifiers of the storages that operations other than norms modify."""
    return {
        number
        for node in nodes
        if getattr(node.target, "overloadpacket", None) not in _NORMS
        for number in written_memory(node)
    }


def _refuse_unsupported(program):
    """Raise ValueError for two batch dimensions, sparse gradients, and writes to parameters."""
    nodes = program.graph.nodes
    for node in nodes:
        for tensor in tensors(node.meta.get("val")):
            if sum(isinstance(size, torch.SymInt) for size in tensor.shape) > 1:
                what = (
                    "a tensor has two batch dimensions; make the samples independent of each other"
                )
                raise ValueError(f"{what}: {node.name}{where(node)}")
        if arguments_of(node).get("sparse"):
            what = "sparse gradients are not supported; remove sparse=True"
            raise ValueError(f"{what}: {node.name}{where(node)}")
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    parameters = [node for node in nodes if kinds.get(node.name) is InputKind.PARAMETER]
    memory = {number for node in parameters for number in memory_of(node)}
    for node in nodes:
        if any(memory & memory_of(target) for target in written_by(node)):
            what = "the model writes to one of its parameters; register this tensor as a buffer"
            raise ValueError(f"{what}: {node.name}{where(node)}")


def _attributes(program, model):
    """Return a dict from constant name to the path of the attribute that contains the constant.

    Constants that the forward pass creates from Python numbers are omitted. Raises ValueError if
    any other constant is not stored in an attribute.
    """
    paths = {id(each): path for path, each in (*attribute_tensors(model), *model.named_buffers())}
    kinds, found = {spec.arg.name: spec for spec in program.graph_signature.input_specs}, {}
    for node in program.graph.find_nodes(op="placeholder"):
        name = kinds[node.name].target
        value = program.constants.get(name)
        if id(value) in paths:
            found[name] = paths[id(value)]
        elif isinstance(value, FakeTensor):
            line = where(next(iter(node.users), node))
            raise ValueError(
                "this model cannot be captured: it reads a tensor that is not stored in the "
                "module; register it as a parameter or buffer, and its layer in an "
                f"nn.ModuleList or nn.ModuleDict{line}"
            )
    return found


def _loss(captured, outputs):
    """Return the Loss of a captured model with the given NamedOutputs."""
    name = outputs.loss()
    if name is None:
        return Loss(None, outputs.without_loss())
    specs = [*outputs.outputs]
    node = captured.program.graph.output_node().args[0][specs.index(name)]
    if node not in captured.piece_of:
        return Loss(None, f"{output_name(name)} does not depend on the inputs of the model")
    return Loss(node, output_name(name), name)


def _freeze(program, trained):
    """Freeze parameters that receive no gradient, which torch optimizers do not update either.

    `trained` contains the names of the parameters that receive a gradient. If it is empty, no
    parameter is changed, because such a model cannot be trained.
    """
    trained_ids = {id(program.state_dict[name]) for name in trained & program.state_dict.keys()}
    for each in (*program.state_dict.values(), *program.constants.values()):
        if trained_ids and is_trained(each) and id(each) not in trained_ids:
            each.requires_grad_(False)


def _pieces(program: ExportedProgram, batch: int, names: Mapping[str, str]) -> Captured:
    """Group the operations of a program into pieces; the module docstring lists the rules.

    A shared weight has several names. `names` maps each of them to the first one, because
    torch.export picks an arbitrary one.
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
    follows = _followers(nodes, inputs, weights)
    members = dict.fromkeys(node for node in nodes if node in follows)
    joined = UnionFind(members)
    for node in members:
        if not carries_batch(node):
            joined.union(node, *(reader for reader in node.users if reader in members))
    for group in _sharing(nodes, weights, members):
        joined.union(*group)
    groups = defaultdict(list)
    for node in members:
        groups[joined[node]].append(node)
    return _ordered(program, batch, weights, inputs, [*groups.values()])


def _followers(nodes, inputs, weights):
    """Return the operations whose results depend on the inputs or on buffers that are modified.

    Operations that depend only on the batch size are excluded. If an included operation writes in
    place, all operations whose results share the written memory are also included.
    """
    follows, before = set(inputs), None
    of_inputs = {number for each in inputs for number in memory_of(each)}
    memory = _modified(nodes, weights)
    modified = {each for each in weights if memory & memory_of(each)}
    while before != len(follows):
        before = len(follows)
        for node in nodes:
            reads = any(each in follows or each in modified for each in node.all_input_nodes)
            if memory_of(node) and (reads or memory & memory_of(node)):
                follows.add(node)
                if of_inputs & written_memory(node):
                    what = "the model writes to one of its inputs; copy the input first"
                    raise ValueError(f"{what}: {node.name}{where(node)}")
                memory |= written_memory(node)
    return follows


def written_memory(node: fx.Node) -> set[int]:
    """Return the identifiers of the storages that an operation modifies."""
    return {number for target in written_by(node) for number in memory_of(target)}


def _modified(nodes, weights):
    """Return the identifiers of the storages of all buffers that the model modifies."""
    written = {
        number
        for node in nodes
        if node.target is not torch.ops.aten.detach_.default  # changes no value
        for number in written_memory(node)
    }
    return written & {number for each in weights for number in memory_of(each)}


def memory_of(node: fx.Node) -> set[int]:
    """Return the identifiers of the storages that contain an operation's results."""
    return {each.untyped_storage()._cdata for each in tensors(node.meta.get("val"))}


def is_size(node: fx.Node) -> bool:
    """Return True if a node computes a tensor size (an integer) instead of a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def outputs_of(captured: Captured) -> list[fx.Node]:
    """Return the distinct outputs of the model that depend on its inputs."""
    read = captured.program.graph.output_node().all_input_nodes
    return [node for node in dict.fromkeys(read) if node in captured.piece_of]


def loss_of(captured: Captured) -> fx.Node | None:
    """Return the output to minimize, or `None` if the model has no loss."""
    return captured.loss.node


def size_of(size: torch.SymInt | int, batch: int) -> int:
    """Convert a possibly symbolic tensor size to an int, for a batch of `batch` samples."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def shape_of(like: torch.Tensor, samples: int) -> list[int]:
    """Return the shape of a captured tensor for a batch of `samples` samples."""
    return [size_of(size, samples) for size in like.shape]


def without_values(value: Any, samples: int) -> Any:
    """Create an uninitialized tensor from a captured one, for a batch of `samples` samples.

    Values that are not tensors are returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    shape, trained = shape_of(value, samples), is_trained(value)
    return torch.empty(shape, dtype=value.dtype, requires_grad=trained)


def state_of(captured: Captured) -> dict[str, torch.Tensor]:
    """Return a dict from name to fake tensor for a model's parameters, buffers and constants."""
    program = captured.program
    return {
        name: program.state_dict.get(name, program.constants.get(name))
        for name in captured.weights.values()
    }


def is_trained(like: torch.Tensor) -> bool:
    """Return True for a parameter that requires a gradient."""
    return isinstance(like, torch.nn.Parameter) and like.requires_grad


def gradient_bytes(like: torch.Tensor) -> int:
    """Return the size in bytes of a parameter's gradient, which is in float32 or wider."""
    return like.numel() * torch.promote_types(like.dtype, torch.float32).itemsize


def carries_batch(node: fx.Node) -> bool:
    """Return True if the size of dimension 0 is the batch size or an integer multiple of it."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    rows = value.shape[0]
    if not isinstance(rows, torch.SymInt):
        return False
    size = rows.node.expr
    (symbol, *others) = size.free_symbols or (None,)
    return symbol is not None and not others and (size / symbol).is_integer is True


def _sharing(nodes, weights, members):
    """Yield groups of operations that stay in one piece, because one of them modifies the memory
    that the others read.

    A group contains all operations whose results share the written memory, and all readers of
    these results. If the written memory is a buffer, the group contains all operations that read
    the buffer. If no other operation passes values to the group or reads its results, as for a
    counter, the group also contains an operation of the module that owns the buffer.
    """
    memory, written, modified = defaultdict(list), set(), _modified(nodes, weights)
    for node in nodes:
        for number in memory_of(node):
            memory[number].append(node)
        written |= written_memory(node)
    for number in written:
        group = [node for node in memory[number] if node in members]
        group += [reader for node in group for reader in node.users if reader in members]
        for buffer in (each for each in weights if {number} & modified & memory_of(each)):
            group += [node for node in buffer.users if node in members]
            if _is_isolated({*group}, members):
                owner = weights[buffer].rpartition(".")[0]
                others = [node for node in members if module_of(node) == owner]
                group += [node for node in others if node not in group][:1]
        if group:
            yield group


def _is_isolated(group, members):
    """Return True if no other member passes a value to a group or reads its results."""
    linked = {each for node in group for each in (*node.all_input_nodes, *node.users)}
    return not any(each in members for each in linked - group)


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that an operation modifies in place."""
    if isinstance(node.target, OpaqueModule):
        _, weights = node.args
        names = zip(node.target.weights, weights, strict=True)
        yield from (weight for name, weight in names if name in node.target.call.written)
        return
    # The operator schemas do not declare that norms write to their running statistics.
    if getattr(node.target, "overloadpacket", None) in _NORMS:
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


def is_batch_norm(node: fx.Node) -> bool:
    """Return True if an operation normalizes with statistics over the samples."""
    if getattr(node.target, "overloadpacket", None) is not torch.ops.aten.batch_norm:
        return False
    *_, in_training = node.args[:6]
    return bool(in_training)


def _ordered(program, batch, weights, inputs, groups):
    """Return the captured module, in which each group of operations is one piece."""
    order = {node: number for number, node in enumerate(program.graph.nodes)}
    piece_of = {node: piece for piece, group in enumerate(groups) for node in group}
    writers = defaultdict(list)
    for node in order:
        if node.op == "call_function" and node not in piece_of:
            for number in {each for target in written_by(node) for each in memory_of(target)}:
                writers[number].append(node)
    pieces = [_piece(group, piece_of, weights, writers, order) for group in groups]
    read = {name for piece in pieces for name in piece.weights}
    unread = {*weights.values()} & {*program.state_dict} - read
    pieces[:1] = [each._replace(weights=(*each.weights, *sorted(unread))) for each in pieces[:1]]
    readers = defaultdict(set)
    for node, piece in piece_of.items():
        for reader in node.users:
            if piece_of.get(reader, piece) != piece:
                readers[node].add(piece_of[reader])
    crossing = {node: tuple(sorted(found)) for node, found in readers.items()}
    return Captured(program, batch, pieces, piece_of, crossing, weights, inputs)


def _piece(group, piece_of, weights, writers, order):
    """Create a Piece from a group of nodes.

    `copies` contains all direct and indirect operands of the group that do not depend on model
    inputs, and all operations that write to the memory of these operands.
    """
    copies, todo, names = set(), [*group], {}
    while todo:
        node = todo.pop()
        written = [each for number in memory_of(node) for each in writers[number]]
        for source in (*node.all_input_nodes, *(written if node in copies else ())):
            if source in weights:
                names[weights[source]] = None
            elif source not in piece_of and source not in copies and source.op == "call_function":
                copies.add(source)
                todo += [] if is_size(source) else [source]
    copies = tuple(sorted(copies, key=order.get))
    return Piece(tuple(group), copies, tuple(sorted(names)), module_of(group[0]))
