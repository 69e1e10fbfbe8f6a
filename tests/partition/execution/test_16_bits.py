"""Modules in bfloat16 and float16, compared with torch with float32 master weights."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import torch

from hpc3d.partition.execution.sample_batches import flat_inputs
from hpc3d.partition.execution.verification import verified
from hpc3d.training.optimizers.optimizer import AdamW
from tests.partition.execution import modules
from tests.partition.execution.modules import (
    HERE,
    assert_trained_alike,
    prepared,
    trained,
    trained_by_torch,
)
from tests.partition.execution.test_module_trainer import SMALL
from tests.strided import rotated

BOTH = torch.bfloat16, torch.float16
EVERYTHING, CHAIN, DROPPING = (f"{HERE}:{name}" for name in ("everything", "chain", "dropping"))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("replicas", "micros", "schedule", "how"),
    [
        ((1,), 2, "none", {}),
        ((1, 1, 1), 3, "1f1b", {"recompute": True}),
        ((1, 1), 4, "zb-h1", {}),
    ],
)
def test_stages_train_like_torch_with_master_weights(
    replicas, micros, schedule, how, dtype, monkeypatch
):
    """Float16 skips its first steps, whose gradients overflow. The table is tied over stages."""
    monkeypatch.setattr(modules, "STEPS", 8)
    found = trained(EVERYTHING, replicas, micros, schedule, dtype=dtype, **how)
    expected = trained_by_torch(EVERYTHING, micros, dtype=dtype)
    assert len({*expected[1]}) > 3, "steps that were not skipped"
    assert_trained_alike(found, expected, torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("replicas", "schedule", "how"),
    [((2, 2), "1f1b", {"zero": 1}), ((3, 1), "1f1b", {}), ((2, 1, 1), "zb-h2", {"zero": 1})],
)
def test_replicas_train_like_torch_with_master_weights(replicas, schedule, how, dtype):
    found = trained(CHAIN, replicas, 2, schedule, dtype=dtype, **how)
    assert_trained_alike(found, trained_by_torch(CHAIN, 2, dtype=dtype), torch.finfo(dtype).eps)


def test_random_numbers_do_not_depend_on_the_stages():
    one, *_ = trained(DROPPING, (1,), 2, "none", dtype=torch.bfloat16)
    found = trained(DROPPING, (2, 1), 2, "1f1b", dtype=torch.bfloat16)
    assert_trained_alike(found, one, torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("dtype", BOTH)
def test_saved_activations_of_16_bits_are_offloaded_and_rounded(dtype):
    plain = trained(EVERYTHING, (1, 1), 2, "1f1b", dtype=dtype)
    both = ("optimizer", "activations")
    for found in (
        trained(EVERYTHING, (1, 1), 2, "1f1b", dtype=dtype, offload=both),
        trained(EVERYTHING, (1, 1), 2, "1f1b", True, dtype=dtype, offload=both),
    ):
        for ours, theirs in zip(found, plain, strict=True):
            assert_trained_alike([ours], theirs, 1e-6)
    rounded = trained(CHAIN, (1, 1), 2, "1f1b", dtype=dtype, keep_dtype="int8")
    exact = trained(CHAIN, (1, 1), 2, "1f1b", dtype=dtype)
    for ours, theirs in zip(rounded, exact, strict=True):
        assert_trained_alike([ours], theirs, 0.02)


def of_small_steps(monkeypatch):
    """Eight updates, each less than half of the distance of adjacent bfloat16 numbers."""
    monkeypatch.setattr(modules, "STEPS", 8)
    monkeypatch.setattr(modules, "RATE", 5e-4)
    return trained(CHAIN, (1, 1), 2, "1f1b", dtype=torch.bfloat16)


def test_small_updates_add_up_in_the_master_weights(monkeypatch):
    found = of_small_steps(monkeypatch)
    assert_trained_alike(found, trained_by_torch(CHAIN, 2, dtype=torch.bfloat16), 1e-3)


def test_lost_master_weights_are_found(monkeypatch):
    update = AdamW.update

    def in_16_bits(optimizer, *given):
        update(optimizer, *given)
        optimizer.copy_to_masters()

    monkeypatch.setattr(AdamW, "update", in_16_bits)
    with pytest.raises(AssertionError):
        test_small_updates_add_up_in_the_master_weights(monkeypatch)


# `translation` adds positions in float32 to embeddings, which torch does not multiply in 16 bits
NARROW = [name for name in SMALL if "translation" not in name]
DEEP = "inputs.partition.bert:made(128, 8, 4, 64, 16, vocabulary=500)"
HOW = [((1, 1), "1f1b", {}), ((1, 1, 1, 1), "zb-h1", {}), ((2, 2), "1f1b", {"zero": 1})]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replicas", "schedule", "how"), rotated(NARROW, HOW, 1))
def test_losses_of_sample_models_match_torch(name, replicas, schedule, how):
    """Stops before the gradients of unimportant weights differ in sign."""
    found = trained(name, replicas, 2, schedule, dtype=torch.bfloat16, **how)
    split = replicas[0] if "res" in name or "dense" in name else 1
    _, losses = trained_by_torch(name, 2, split, torch.bfloat16)
    for _, seen in found:
        np.testing.assert_allclose(seen, losses, rtol=4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    "name", [EVERYTHING, *(pytest.param(name, marks=pytest.mark.slow) for name in [*NARROW, DEEP])]
)
def test_correct_program_is_verified(name, dtype):
    """The gradient of the last bias in DEEP is small: the sum of 1,024 gradients that cancel."""
    module, inputs, captured = prepared(name, dtype)
    half = captured.batch // 2
    shares = [range(half), range(half, captured.batch)]
    found = verified(module, captured, flat_inputs(captured, inputs), shares)
    assert found[0].startswith("verified on")
