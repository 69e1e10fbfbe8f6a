"""Dropout by sample: the same on every cut, and what dropout should be."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from hpc3d.partition.capture import capture
from hpc3d.partition.execution.random_operations import Draw
from hpc3d.partition.execution.stage_program import stage_programs
from tests.partition.execution.modules import HERE, trained
from tests.partition.sample_models import Function


def programmed(function, shape=(400, 4), pieces=None):
    """`run(Draw, x)` of a module that applies a function to an input, as one part."""
    module = Function(lambda y, x: function(x) + 0 * y.sum())
    module.layer = nn.Linear(shape[-1], 1)
    captured = capture(module, (torch.ones(shape),))
    (program,) = stage_programs(captured, [range(len(captured.pieces))])
    weights = {
        name: torch.ones(captured.program.state_dict[name].shape) for name in program.weights
    }

    def run(draw, x):
        _, (made,) = program.run(draw, [], {captured.inputs[0]: x}, weights)
        return made

    return run


def dropped(x):
    return functional.dropout(x, 0.25)


def test_dropout_mask_depends_only_on_seed_step_and_sample():
    run, x = programmed(dropped), torch.rand(400, 4)
    whole = run(Draw(1, 2, 0, 400), x)
    for first, stop in [(0, 7), (7, 250), (250, 400)]:
        part = run(Draw(1, 2, first, stop - first), x[first:stop])
        assert (part == whole[first:stop]).all()
    assert (run(Draw(1, 2, 0, 400), x) == whole).all()
    for other in (Draw(2, 2, 0, 400), Draw(1, 3, 0, 400), Draw(1, 2, 1, 400)):
        assert (run(other, x) != whole).any()


def test_dropout_rate_and_scale():
    found = programmed(dropped)(Draw(0, 0, 0, 4000), torch.ones(4000, 4))
    assert set(found.unique().tolist()) == {0.0, float(np.float32(1 / 0.75))}
    assert abs(float((found == 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 16_000) ** 0.5


def test_two_dropout_operations_use_different_masks():
    found = programmed(lambda x: dropped(x) - dropped(x))(Draw(0, 0, 0, 400), torch.ones(400, 4))
    assert found.any()


def test_dropout_finds_a_batch_in_another_dimension():
    """Tokens first: the mask of a sample is that of its column."""
    run = programmed(lambda x: dropped(x.T).T)
    whole = run(Draw(0, 0, 0, 40), torch.ones(40, 4))
    assert (run(Draw(0, 0, 30, 10), torch.ones(10, 4)) == whole[30:]).all()


def test_dropout2d_drops_entire_channels():
    run = programmed(lambda x: functional.dropout2d(x, 0.5), (40, 5, 3, 3))
    found = run(Draw(0, 0, 0, 40), torch.ones(40, 5, 3, 3)).flatten(2)
    assert (found == found[:, :, :1]).all() and 0 < float(found.mean()) < 2


def test_in_place_dropout_changes_its_operand():
    def twice(x):
        y = x * 1
        functional.dropout(y, 0.5, inplace=True)
        return y

    assert (programmed(twice)(Draw(0, 0, 0, 400), torch.ones(400, 4)) == 0).any()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_drops_probabilities(causal):
    """Those that are kept, by 1 / (1 - p), times the values: ones, so that rows sum to the kept
    share of them."""

    def attend(x):
        return functional.scaled_dot_product_attention(x, x, x, None, 0.5, causal)

    def exact(x):
        return functional.scaled_dot_product_attention(x, x, x, None, 0.0, causal)

    x = torch.rand(2000, 4, 4)
    means = [
        programmed(function, (2000, 4, 4))(Draw(0, 0, 0, 2000), x).mean(0)
        for function in (attend, exact)
    ]
    assert (means[0] != means[1]).any()
    np.testing.assert_allclose(*(mean.numpy() for mean in means), atol=0.05)


def test_inactive_dropout_is_unchanged():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    captured = capture(module, (torch.ones(4, 4),))
    stage_programs(captured, [range(len(captured.pieces))])
    assert programmed(lambda x: functional.dropout(x, 0.0))(
        Draw(0, 0, 0, 400), torch.ones(400, 4)
    ).all()


@pytest.mark.parametrize("function", [torch.rand_like, torch.bernoulli])
def test_other_random_operations_are_rejected(function):
    with pytest.raises(ValueError, match="would depend on the partition; use dropout"):
        programmed(lambda x: x * function(x))


@pytest.mark.slow
def test_dropout_is_the_same_on_every_split():
    """Stages, replicas and microbatches of every kind against one rank and one microbatch."""
    name = f"{HERE}:dropping"
    ((expected, losses),) = trained(name, (1,), 1, "none")
    for replicas, micros, how in [
        ((1, 1), 4, {}),
        ((2, 1), 3, {}),
        ((1, 2), 2, {"recompute": True}),
    ]:
        for ours, seen in trained(name, replicas, micros, "1f1b", **how):
            np.testing.assert_allclose(seen, losses, rtol=1e-10)
            for key, value in ours.items():
                np.testing.assert_allclose(value, expected[key], 0, 1e-10, err_msg=key)
    ((dry, _),) = trained(f"{HERE}:chain", (1,), 1, "none")
    assert any((dry[key] != expected[key]).any() for key in dry)
