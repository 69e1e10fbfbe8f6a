"""Exceptions of torch, converted to exceptions that a run reports on one line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.user_code import described

# Messages of the allocators for the CPU and for CUDA devices, with the size as a group
_ALLOCATION = re.compile(
    r"DefaultCPUAllocator: .*tried to allocate (\d+ bytes)|"
    r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)"
)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError if torch cannot allocate memory, for which it raises RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if not (found := _ALLOCATION.search(str(error))):
            raise
        raise MemoryError(f"unable to allocate {found[1] or found[2]}") from error


@contextmanager
def data_errors(module: fx.GraphModule, batch: str) -> Iterator[None]:
    """Raise BadData if an operation of `module` rejects its operands, such as a wrong label.

    `batch` names the inputs in the message.
    """
    try:
        with memory_errors():
            yield
    except (IndexError, RuntimeError) as error:
        line = where(node) if (node := _failed(module, error)) else ""
        name = f"{node.name}{line}" if node else "an operation"
        raise BadData(
            f"{batch}: {name} raised {described(error)}; correct the inputs of this batch"
        ) from error


def _failed(module, error):
    """Return the operation that raised an error, or None."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each.line or "" for each in frames if each.filename.startswith("<eval_with_key")]
    name = lines[-1].partition("=")[0].strip() if lines else ""
    return next((node for node in module.graph.nodes if node.name == name), None)
