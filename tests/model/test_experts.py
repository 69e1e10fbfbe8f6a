"""Mixtures of experts, compared with torch in float64; tests/pipeline/test_mixtures.py tests them
on meshes."""

import numpy as np
import pytest

from hpc3d.model import experts
from hpc3d.model.families import GPT2, LLAMA
from hpc3d.model.spec import Experts, ModelSizes
from tests.model import mixture_reference
from tests.model.test_stage import SHAPE, batch, same_as, serial

TOP_1 = Experts(6, balance_loss=0.3, z_loss=0.2)
TOP_2 = Experts(6, top_k=2, capacity=1.0, every=2, shared=1, balance_loss=0.3, z_loss=0.2)
ROOM = Experts(4, top_k=3, capacity=0, balance_loss=0.3)
FAMILIES = [(GPT2, {}), (LLAMA, {"kv_heads": 2, "ffn": 40, "tied": False})]


def sizes(experts, **how):
    return ModelSizes(**SHAPE | how, experts=experts, std=0.3)


@pytest.mark.parametrize("experts", [TOP_1, TOP_2, ROOM])
@pytest.mark.parametrize(("family", "how"), FAMILIES, ids=["gpt2", "llama"])
def test_mixture_loss_and_gradients_match_torch(family, how, experts):
    same_as(mixture_reference.loss, sizes(experts, **how), family)


def a_slot_too_far(right):
    """Fault: each choice uses the forward slot of the next choice with a slot."""

    def combine(y, slots, weights, out):
        return right(y, np.where(slots < 0, -1, (slots + 1) % len(y)), weights, out)

    return combine


def gradients_of_dropped_tokens(right):
    """Fault: a token without a slot gets the gradient of the last one, as with index -1."""

    def dispatch_grad(dslots, slots, out):
        return right(dslots, np.where(slots < 0, len(dslots) - 1, slots), out)

    return dispatch_grad


def padding_with_a_gradient(right):
    """Fault: slots without a token have a gradient, which only affects biases, because their rows
    of X are zero."""

    def combine_grad(dy, y, slots, weights, out):
        _, dweights = right(dy, y, slots, weights, out)
        out[np.setdiff1d(np.arange(len(out)), slots)] = 0.01
        return out, dweights

    return combine_grad


@pytest.mark.parametrize(
    ("name", "fault", "found"),
    [
        ("combine", a_slot_too_far, r"assert \d+\.\d+ =="),
        ("dispatch_grad", gradients_of_dropped_tokens, "layers.1.proj.weight"),
        ("combine_grad", padding_with_a_gradient, "experts.down.bias"),
    ],
)
def test_planted_fault_in_expert_routing_is_detected(monkeypatch, name, fault, found):
    shape = sizes(TOP_1)
    monkeypatch.setattr(experts, name, fault(getattr(experts, name)))
    with pytest.raises(AssertionError, match=found):
        same_as(mixture_reference.loss, shape)


@pytest.mark.parametrize(("family", "how"), FAMILIES, ids=["gpt2", "llama"])
def test_single_expert_with_full_capacity_equals_the_dense_model(family, how):
    """Its weight is 1 for any router output, so the router has no gradient."""
    alone = Experts(1, capacity=0, balance_loss=0, z_loss=0)
    mixture, dense = serial(sizes(alone, **how), family), serial(sizes(None, **how), family)
    of_dense = {item.name: item for item in dense.parameters}
    for item in mixture.parameters:
        if (other := of_dense.get(item.name.replace("experts.", ""))) is not None:
            item.value[:] = other.value.reshape(item.shape)
    tokens, targets = batch(sizes(None))
    assert mixture.gradients(tokens, targets) == pytest.approx(
        dense.gradients(tokens, targets), rel=1e-12
    )
    for item in mixture.parameters:
        if item.name.endswith("router.weight"):
            assert not item.grad.any()
            continue
        expected = of_dense[item.name.replace("experts.", "")].grad
        np.testing.assert_allclose(item.grad.reshape(expected.shape), expected, atol=1e-12)
