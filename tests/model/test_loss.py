"""Cross-entropy with a full and with a split vocabulary, compared with torch."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpc3d.comm.threads import run
from hpc3d.model.loss import CrossEntropy
from hpc3d.ops.cross_entropy import IGNORE

VOCABULARY, COLUMNS, ROWS, SCALE = 10, 12, 7, 0.25  # two columns of padding
TARGETS = np.array([0, 9, IGNORE, 4, 5, 9, IGNORE])


@pytest.mark.parametrize("size", [1.0, 1e4, -1e4], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
def test_cross_entropy_and_gradient_match_torch(ranks, size):
    """Tests also logits near 1e4 and -1e4, whose exponentials overflow or vanish; on 12 ranks, two
    have only padding."""
    logits = np.random.default_rng(2).normal(size, 3, (ROWS, COLUMNS))
    given = torch.tensor(logits[:, :VOCABULARY], requires_grad=True)
    how = {"ignore_index": IGNORE, "reduction": "sum"}
    expected = functional.cross_entropy(given, torch.tensor(TARGETS), **how)
    (expected * SCALE).backward()
    gradient = np.pad(given.grad.numpy(), [(0, 0), (0, COLUMNS - VOCABULARY)])

    def rank(mesh):
        width = COLUMNS // ranks
        part = slice(mesh.rank * width, (mesh.rank + 1) * width)
        loss = CrossEntropy(mesh, ("x",), VOCABULARY)
        total, saved = loss.forward(logits[:, part].copy(), TARGETS, SCALE)
        return total, loss.backward(saved, SCALE), gradient[:, part]

    for total, found, wanted in run({"x": ranks}, rank):
        assert total == pytest.approx(expected.item(), rel=1e-11)
        np.testing.assert_allclose(found, wanted, atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
def test_score_returns_the_loss_and_the_correct_predictions(ranks):
    """For one target, two rows share the highest logit, and a tie counts as correct."""
    logits = np.random.default_rng(3).normal(0, 3, (ROWS, COLUMNS))
    logits[1, 9], logits[2, 4], logits[4, 5] = 20, 20, 20
    logits[4, 3] = 20  # a tie
    logits[5, 11] = 30  # padding
    given, targets = torch.tensor(logits[:, :VOCABULARY]), torch.tensor(TARGETS)
    how = {"ignore_index": IGNORE, "reduction": "sum"}
    expected = functional.cross_entropy(given, targets, **how).item()
    top, valid = given.max(1).values, targets != IGNORE
    right = int((given[torch.arange(ROWS), targets.clamp(0)] == top)[valid].sum())

    def rank(mesh):
        width = COLUMNS // ranks
        part = slice(mesh.rank * width, (mesh.rank + 1) * width)
        loss = CrossEntropy(mesh, ("x",), VOCABULARY)
        return loss.score(logits[:, part].copy(), TARGETS)

    for found in run({"x": ranks}, rank):
        assert found.tolist() == pytest.approx([expected, right], rel=1e-11) and right >= 2
