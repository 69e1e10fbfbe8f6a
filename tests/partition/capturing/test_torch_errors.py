"""Errors of torch are reported on one line."""

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capture import capture
from hpc3d.partition.capturing.torch_errors import data_errors, memory_errors
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.stage_program import stage_programs


class Classifier(torch.nn.Linear):
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(super().forward(x), y)


def test_operation_that_rejects_its_operands_is_named():
    module, x, y = Classifier(4, 3), torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)
    captured = capture(module, (x, y))
    (program,) = stage_programs(captured, [range(len(captured.pieces))])
    weights = dict(module.named_parameters())
    inputs = dict(zip(captured.inputs, (x, y + 7), strict=True))
    line = (
        r"^step 5: cross_entropy_loss \(.*/test_torch_errors.py:\d+\) raised IndexError: Target 7 "
        r"is out of bounds( \(.*\))?; correct the inputs of this batch$"
    )
    with pytest.raises(BadData, match=line), data_errors(program.module, "step 5"):
        program.run(Draw(0, 0, 0, 4), (), inputs, weights)


def test_failed_allocation_raises_memory_error():
    line = r"^unable to allocate 4000000000000000 bytes$"
    with pytest.raises(MemoryError, match=line), memory_errors():
        torch.empty(10**15)


def test_failed_allocation_on_a_gpu_raises_memory_error():
    said = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a capacity of 79.1 GiB"
    line = r"^unable to allocate 20\.00 GiB$"
    with pytest.raises(MemoryError, match=line), memory_errors():
        raise torch.OutOfMemoryError(said)


def test_other_errors_are_not_changed():
    with pytest.raises(RuntimeError, match=r"^another error$"), memory_errors():
        raise RuntimeError("another error")
