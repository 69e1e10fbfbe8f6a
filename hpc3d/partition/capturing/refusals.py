"""Explain in one line why torch.export cannot trace a model."""

from __future__ import annotations

from collections.abc import Iterator
from traceback import walk_tb

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.nn.utils.rnn import PackedSequence

from hpc3d.partition.capturing.flat_export import FixedBatch, module_of, where
from hpc3d.partition.capturing.user_code import (
    UntraceableCode,
    described,
    is_raised_by_torch,
    line_in_user_code,
    tensors,
)
from hpc3d.partition.capturing.user_module import line_of_enclosing

_ON_DATA = "the control flow or a tensor size depends on tensor values"
_ON_BATCH = (
    "the code assumes a fixed batch size, or a size derived from it; compute sizes from the "
    "shapes of the inputs, as in x.shape[0] instead of len(x)"
)
_SELECTS = (
    "; compute all elements and select with torch.where, or move the code into a submodule that "
    "returns tensors whose sizes do not depend on values"
)
_REMEDY = "; move this code into a submodule"
_OF_DATA = GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException
_FOREIGN_TENSOR = "doesn't match mode"  # part of a message of torch
# Parts of messages of torch, and explanations.
_MESSAGES = {
    ".numpy() is not supported": "the code converts a tensor to a NumPy array",
    "functorch": "torch.export cannot trace transformations of torch.func",
}


class UntraceableOperation(ValueError):
    """Error raised for a traced operation that hpc3d only supports in an opaque operation.

    `path` is the path of the submodule that contains the operation `node`.
    """

    def __init__(self, what: str, node: fx.Node, remedy: str = _REMEDY) -> None:
        super().__init__(f"{what}: {node.name}{where(node)}")
        self.path, self.remedy = module_of(node), remedy


def refuse_dependence_on_data(program: ExportedProgram) -> None:
    """Raise UntraceableOperation if a size or a Python number depends on tensor values."""
    for node in program.graph.nodes:
        made = tensors(node.meta.get("val"))
        if any(map(is_functorch_wrapped_tensor, made)):
            raise UntraceableOperation(_MESSAGES["functorch"], node)
        if any(_depends_on_data(size) for tensor in made for size in tensor.shape):
            what = "the size of a tensor depends on the values of another"
            raise UntraceableOperation(what, node, _SELECTS)
        if made and any(_depends_on_data(each.meta.get("val")) for each in node.all_input_nodes):
            raise UntraceableOperation("a Python number depends on the values of a tensor", node)


def _depends_on_data(number):
    """Return True if a symbolic number depends on the values of a tensor."""
    symbolic = isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
    return symbolic and bool(free_unbacked_symbols(number))


def explained(error: BaseException, model: torch.nn.Module, path: str) -> str:
    """Explain an error that was raised while a model was traced.

    `path` is the path of the submodule that was running. The explanation contains the file and
    line of the user's code and, if the code belongs to no submodule, a remedy.
    """
    if isinstance(error, UntraceableOperation):
        return f"{error}{'' if path else error.remedy}"
    if isinstance(error, FixedBatch):
        return f"{_ON_BATCH}{error.line or line_of_enclosing(model, path)}"
    line = line_in_user_code(error) or line_of_enclosing(model, path)
    if reason := _reason(error):
        return f"{reason}{line}{'' if path else _REMEDY}"
    if _FOREIGN_TENSOR in str(error):
        return f"forward modifies a tensor that is not a buffer{line}; register it as a buffer"
    message = described(error).removesuffix(line)
    if isinstance(error, ValueError):
        message = message.partition(": ")[2]
    elif not path and is_raised_by_torch(error):
        return f"{message}{line}{_REMEDY}, if it runs without torch.export"
    return f"{message}{line}"


def _reason(error: BaseException) -> str:
    """Return the reason for an error if the code can be part of an opaque operation, or ""."""
    if isinstance(error, UntraceableCode):
        return f"{error}, which torch.export cannot trace"
    if isinstance(error, _OF_DATA):
        return _ON_DATA
    if isinstance(error, UnsupportedOperatorException):
        return f"torch.export cannot trace {error.func}"
    if any(isinstance(each, PackedSequence) for each in _local_values(error)):
        return "the sizes of a packed sequence depend on tensor values"
    return next((text for part, text in _MESSAGES.items() if part in str(error)), "")


def _local_values(error: BaseException) -> Iterator[object]:
    """Yield the values of the local variables of all functions in an error's traceback."""
    for frame, _ in walk_tb(error.__traceback__):
        yield from frame.f_locals.values()
