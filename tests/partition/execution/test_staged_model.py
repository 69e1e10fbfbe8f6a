"""Data of a partitioned module that all ranks share, and modules that cannot be trained."""

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capture import capture
from hpc3d.partition.execution import staged_model as staged_module
from hpc3d.partition.execution.staged_model import owners_of, staged_model
from tests.partition.execution.modules import HERE, even_parts, prepared
from tests.partition.sample_models import Function
from tests.partition.user_models import HERE as USERS


def staged(captured, replicas, chunks=1, parts=None):
    count = len(replicas) * chunks
    parts = parts or even_parts(captured, count)
    return staged_model(captured, parts, replicas, [False] * count)


def test_weights_belong_to_the_stages_of_their_chunks():
    """With two chunks, parts 0 and 2 are on the first stage, and 1 and 3 on the second."""
    _, _, captured = prepared(f"{HERE}:chain")
    model = staged(captured, (1, 2), chunks=2)
    assert (len(model.programs), model.dtype) == (4, "float64")
    for name, stages in model.owners.items():
        parts = [part for part, each in enumerate(model.programs) if name in each.weights]
        assert stages == tuple(sorted({part % 2 for part in parts}))


def test_weights_without_readers_belong_to_the_stage_of_the_first_piece():
    _, _, captured = prepared(f"{USERS}:idle")
    model = staged(captured, (1, 1))
    for name in ("unused", "note", "seen", "counts"):
        assert model.owners[name] == (0,)


class Mixed(torch.nn.Sequential):
    """A layer in 16 bits and one in float32."""

    def __init__(self):
        super().__init__(torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4))

    def forward(self, x):
        return self[1](self[0](x).float()).mean()


def function(which, x=None):
    return capture(Function(which).to(torch.float64), (torch.rand(6, 4).double(),))


@pytest.mark.parametrize(
    ("captured", "line"),
    [
        (
            lambda: function(lambda y, x: y + x),
            "must return its loss as a scalar that requires a gradient",
        ),
        (lambda: function(lambda y, x: x.sum()), "found: none|must return its loss"),
        (
            lambda: capture(
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double()),
                (torch.rand(6, 4),),
            ),
            r"cannot be captured|found: float32 \(.*\), float64 \(.*\); make the plan",
        ),
        (
            lambda: capture(Mixed(), (torch.rand(6, 4).bfloat16(),)),
            r"found: bfloat16 \(0.*\), float32 \(1.*\); make the plan with --dtype float32",
        ),
    ],
)
def test_untrainable_module_is_rejected(captured, line):
    with pytest.raises(ValueError, match=line):
        staged(captured(), (1,))


def test_16_bits_require_gradients_of_another_type(monkeypatch):
    """Older versions of torch have no such attribute."""
    _, _, captured = prepared(f"{HERE}:chain", torch.bfloat16)
    assert staged(captured, (1,)).dtype == "bfloat16"
    monkeypatch.setattr(staged_module, "_HAS_GRADIENT_TYPE", False)
    with pytest.raises(ValueError, match=r"in bfloat16: torch .* has torch\.Tensor\.grad_dtype"):
        staged(captured, (1,))


def test_loss_must_be_on_the_last_stage():
    captured = function(lambda y, x: (y.sum(), torch.tanh(y)))
    order = [*range(len(captured.pieces))]
    loss = next(n for n in order if "sum" in captured.pieces[n].nodes[0].name)
    order.remove(loss)
    with pytest.raises(ValueError, match="the loss, sum_1, must be computed by the last stage"):
        staged(captured, (1, 1), parts=[[order[0], loss], order[1:]])


def test_owners_are_the_stages_with_a_weight():
    found = owners_of([["a", "b", "a"], ["c"], ["b", "c", "d"]])
    assert found == {"a": (0,), "b": (0, 2), "c": (1, 2), "d": (2,)}
