"""Explain in one line why torch.export cannot trace a model."""

from __future__ import annotations

import torch
from torch import fx

from hpc3d.partition.capturing.flat_export import module_of, where
from hpc3d.partition.capturing.user_code import described, line_in_user_code
from hpc3d.partition.capturing.user_module import line_of

_ON_DATA = "the control flow or a tensor size depends on tensor values"
_ON_BATCH = (
    "the code assumes a fixed batch size, or a size derived from it; compute sizes from the "
    "shapes of the inputs"
)
_REMEDY = "; move this code into a submodule"


class DependsOnData(ValueError):
    """Error raised if a tensor size or a Python number depends on tensor values.

    `path` is the path of the submodule that contains the operation `node`.
    """

    def __init__(self, what: str, node: fx.Node) -> None:
        super().__init__(f"{what}: {node.name}{where(node)}")
        self.path = module_of(node)


def explained(error: BaseException, model: torch.nn.Module, path: str) -> str:
    """Explain an error that was raised while a model was traced.

    `path` is the path of the submodule that was running. The explanation contains the file and
    line of the user's code and, if the code belongs to no submodule, a remedy.
    """
    if isinstance(error, DependsOnData):
        return f"{error}{'' if path else _REMEDY}"
    line = line_in_user_code(error) or _line_of_enclosing(model, path)
    message = described(error).removesuffix(line)
    if "Constraints violated" in message or "specialized" in str(error):
        return f"{_ON_BATCH}{line}"
    if "data-dependent" in message:
        return f"{_ON_DATA}{line}{'' if path else _REMEDY}"
    if isinstance(error, ValueError):
        message = message.partition(": ")[2]
    return f"{message}{line}"


def _line_of_enclosing(model: torch.nn.Module, path: str) -> str:
    """Return the line of the innermost module containing `path` that torch does not define."""
    while path and not line_of(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return line_of(model.get_submodule(path))
