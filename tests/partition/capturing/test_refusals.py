"""One-line errors for code that cannot be traced, with its place and a remedy."""

import pytest

pytest.importorskip("torch")

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from hpc3d.partition.capture import capture, captured_of
from hpc3d.partition.capturing.user_code import random_states
from tests.partition.functions_of_samples import Layers, values
from tests.partition.user_models import Base, rows

HERE = "tests.partition.capturing.test_refusals"


class Reads(Base):
    """Model that reads a number from a tensor."""

    def forward(self, x):
        return self.loss(x) * x.sum().item()


class Decides(Base):
    def forward(self, x):
        return self.loss(x if x.sum().item() > 0 else -x)


class Reentrant(Base):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=True)).mean()


class Hidden(Base):
    """Model with a layer that is not a submodule."""

    def __init__(self):
        super().__init__()
        self.others = [nn.Linear(6, 6)]

    def forward(self, x):
        return self.loss(self.others[0](x))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Reads, r"a Python number depends .*: mul \(.*\.py:\d+\); move this code into a submod"),
        (Decides, r"depends on tensor values \(.*\.py:\d+\); move this code into a submodule$"),
        (Reentrant, r"pass use_reentrant=False to torch.utils.checkpoint.* \(.*\.py:\d+\)$"),
        (Hidden, r"not stored in the module; register it as .*ModuleDict \(.*\.py:\d+\)$"),
    ],
)
def test_refusal_names_a_line_and_a_remedy(kind, line):
    with pytest.raises(ValueError, match=f"^this model cannot be captured: .*{line}") as found:
        capture(kind(), (rows().float(),))
    assert len(str(found.value).splitlines()) == 1 and "test_refusals.py" in str(found.value)


def test_checkpointing_without_reentry_is_traced():
    class Traced(Base):
        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=False)).mean()

    captured = capture(Traced(), (rows().float(),))
    assert all(each.requires_grad for each in captured.program.state_dict.values())


def fixed_size(model, x):
    return model.squares(x + torch.ones(8, 6)).mean()  # the line that is named


def length(model, x):
    return model.squares(x).sum() / len(x)  # the line that is named


def condition_on_size(model, x):
    return model.squares(x if x.shape[0] > 4 else -x).mean()  # the line that is named


@pytest.mark.parametrize("function", [fixed_size, length, condition_on_size])
def test_line_that_fixes_the_batch_size_is_named(function):
    with pytest.raises(ValueError, match="assumes a fixed batch size") as found:
        capture(Layers(function), (values(8, 6),))
    line = function.__code__.co_firstlineno + 1
    assert str(found.value).endswith(f"instead of len(x) ({__file__}:{line})")


def converted(model, x):
    return model.squares(x + torch.from_numpy(np.tanh(x.numpy()))).mean()


def compared(model, x):
    return model.squares(x if torch.equal(x, x) else -x).mean()


def counted(model, x):
    return model.squares(x).mean() * len(x.nonzero())


def selected(model, x):
    return model.squares(x)[x > 0].mean()


def mapped(model, x):
    return torch.func.vmap(torch.tanh)(model.squares(x)).mean()


def differentiated(model, x):
    return torch.autograd.functional.jacobian(model.b, model.a(x)).mean()


def summed_in_place(model, x):
    model.total += 1
    return model.squares(x).mean() * model.total


def copied(model, x):
    return model.squares(copy.deepcopy(model.a)(x)).mean()


def broken(model, x):
    raise LookupError("no such layer")


def backward(model, x):
    loss = model.squares(x).mean()
    loss.backward()
    return loss


def tied(model, x):
    model.b.weight = model.a.weight
    return model.squares(x).mean()


def chosen_by_python(model, x):
    return model.squares(x if random.random() > 0.5 else -x).mean()


def scaled_by_numpy(model, x):
    return model.squares(x * np.random.rand()).mean()  # noqa: NPY002


SUBMODULE = r" \(.*\.py:\d+\); move this code into a submodule$"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (converted, f"the code converts a tensor to a NumPy array{SUBMODULE}"),
        (compared, f"the control flow .* depends on tensor values{SUBMODULE}"),
        (counted, f"the control flow .* depends on tensor values{SUBMODULE}"),
        (selected, r"depends on .* another: index \(.*:\d+\); .* torch.where, or move .* values$"),
        (mapped, f"cannot trace transformations of torch.func: .*{SUBMODULE}"),
        (differentiated, f"forward computes gradients, which torch.export .*{SUBMODULE}"),
        (summed_in_place, r"modifies a tensor that is not a buffer \(.*:\d+\); register it as"),
        (copied, f"RuntimeError: .*{SUBMODULE[:-1]}, if it runs without torch.export$"),
        (broken, r"LookupError: no such layer \(.*:\d+\)$"),
        (backward, r"forward calls backward\(\); return the loss instead \(.*:\d+\)$"),
        (tied, r"forward assigns b.weight; assign it in __init__ \(.*:\d+\)$"),
        (chosen_by_python, r"numbers from Python's random, .* torch.where \(.*:\d+\)$"),
        (scaled_by_numpy, r"numbers from NumPy, .* torch.where \(.*:\d+\)$"),
    ],
)
def test_code_that_torch_export_cannot_trace_is_named_with_a_remedy(function, text):
    model, generators = Layers(function), random_states()
    model.total = torch.zeros((), dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^this model cannot be captured: .*{text}") as found:
        capture(model, (values(8, 6),))
    assert len(str(found.value).splitlines()) == 1
    assert not generators.advanced(), "capturing restores the random number generators"


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.cell(packed)[0].data.mean()


def test_packed_sequence_is_rejected():
    with pytest.raises(ValueError, match=r"a packed sequence depend on tensor values \(.*:\d+\)"):
        capture(Sequences(), (torch.ones(8, 3, 6), 3 - torch.arange(8) // 7))


def with_member(**members):
    model = Base().double()
    for name, value in members.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (with_member(table=torch.eye(3).to_sparse()), "the tensor table is sparse; replace it by"),
        (with_member(more=nn.LazyLinear(3)), "the tensor more.weight is uninitialized; call the"),
        (with_member(norm=nn.BatchNorm1d(6, momentum=None)), "submodule norm .* momentum=None by"),
    ],
)
def test_unsupported_members_are_rejected(model, text):
    with pytest.raises(ValueError, match=rf"cannot be captured: .*{text} .* \(.*\.py:\d+\)$"):
        capture(model, (rows(),))


def test_sparse_gradients_are_rejected():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 6, sparse=True)

        def forward(self, ids):
            return self.table(ids).mean()

    with pytest.raises(ValueError, match=r"remove sparse=True: embedding \(.*\.py:\d+\)$"):
        capture(Sparse(), (torch.arange(8),))


class TimeMajor(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, source):
        found = self.cell(source)
        return found[0].mean() if isinstance(found, tuple) else found.mean()


def recurrent():
    return TimeMajor(nn.LSTM(6, 6)), (torch.zeros(5, 8, 6),)


def attending():
    return TimeMajor(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)), (torch.zeros(5, 8, 6),)


@pytest.mark.parametrize("name", ["attending", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_input_whose_batch_may_be_dimension_1_is_named(name):
    with pytest.raises(ValueError, match="; if the batch is dimension 1 of source, wrap"):
        captured_of(f"{HERE}:{name}")


@pytest.mark.parametrize("name", ["rolled", "rolled_rows"])
def test_other_batch_dimension_is_named_only_if_the_model_can_be_traced_with_it(name):
    with pytest.raises(ValueError, match=r"along the batch dimension: roll .*separately$"):
        captured_of(f"{HERE}:{name}")


def rolled():
    return Layers(lambda model, x: model.squares(x.roll(1, 0)).mean()), (values(8, 6),)


def rolled_rows():
    rows_of_rows = values(8, 5, 6)
    return Layers(lambda model, x: model.squares(x.roll((1, 1), (0, 1))).mean()), (rows_of_rows,)
