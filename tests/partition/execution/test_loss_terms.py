"""Losses that average over valid targets, whose number differs between microbatches."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capture import capture, captured_of
from hpc3d.partition.execution.loss_terms import LossTerms
from tests.partition.execution.modules import (
    assert_trained_alike,
    prepared,
    trained,
    trained_by_torch,
)

HERE = "tests.partition.execution.test_loss_terms"
CLASSES, BATCH, LENGTH = 5, 12, 4


class Tokens(nn.Module):
    """Classification of tokens; `loss(logits, labels)` compares [B, T, C] with [B, T]."""

    def __init__(self, loss):
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, 6), nn.Linear(6, 6)
        self.head, self.loss = nn.Linear(6, CLASSES), loss
        self.register_buffer("weight", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.layer(self.table(ids))))
        return self.loss(self, logits, labels)


def tokens(loss):
    """Return tokens; sample n has 0 to LENGTH labels, and one microbatch has none."""
    ids = (torch.arange(BATCH * LENGTH) ** 2).reshape(BATCH, LENGTH) % CLASSES
    labels = (3 * ids + 1) % CLASSES
    for row in range(BATCH):
        labels[row, : LENGTH if row < 3 else row % 3] = -100
    return Tokens(loss), (ids, labels)


def padded():
    return tokens(
        lambda _, logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels)
    )


def flattened():
    """Next-token loss of a model that shifts and pads the labels itself."""

    def loss(model, logits, labels):
        labels = functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.view(-1), model.weight, label_smoothing=0.1
        )

    return tokens(loss)


def likelihood():
    def loss(model, logits, labels):
        found = functional.log_softmax(logits, -1).flatten(0, 1)
        return functional.nll_loss(found, labels.flatten(), ignore_index=-100)

    return tokens(loss)


def masked():
    """Mean over the labeled tokens, written as a quotient."""

    def loss(model, logits, labels):
        mask = (labels != -100).to(logits.dtype)
        errors = (logits.square().sum(-1) - labels) * mask
        return errors.sum() / mask.sum().clamp(min=1)

    return tokens(loss)


def scaled():
    """Loss with factors of sums and counts."""

    def loss(model, logits, labels):
        mask = (labels != -100).to(logits.dtype)
        errors, count = logits.square().sum(-1) * mask, mask.sum().clamp(min=1)
        first = 0.5 * errors.sum() / count - 0.25 * torch.einsum("bt->", errors) / count
        return first + (errors / count).sum() + errors.mean() / mask.mean().clamp(min=1e-6)

    return tokens(loss)


def by_class():
    """Weighted mean over classes of the means in each class."""

    def loss(model, logits, labels):
        classes = functional.one_hot(labels.clamp(min=0), CLASSES).to(logits.dtype).flatten(0, 1)
        sums = classes.T @ logits.square().sum(-1).flatten()
        frequent = (labels == 1).sum() / (labels != 1).sum()
        return (sums / classes.sum(0).clamp(min=1)).mean() + frequent * logits.square().mean()

    return tokens(loss)


def two_terms():
    """Terms with different denominators, one of which is the number of samples."""

    def loss(model, logits, labels):
        first = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return 0.5 * first + functional.cross_entropy(logits[:, 0], labels[:, 0].clamp(min=0))

    return tokens(loss)


@pytest.mark.parametrize(
    "name", ["padded", "flattened", "likelihood", "masked", "scaled", "by_class", "two_terms"]
)
@pytest.mark.parametrize(("replicas", "micros"), [((1, 1), 4), ((2,), 3)])
def test_microbatches_are_weighted_by_their_valid_targets(name, replicas, micros):
    """Torch computes the loss of the full batch."""
    name = f"{HERE}:{name}"
    found = trained(name, replicas, micros, "1f1b" if replicas[1:] else "none")
    assert_trained_alike(found, trained_by_torch(name, 1))


class Items(Tokens):
    """Sum over the tokens, divided by a number that the user passes."""

    def forward(self, ids, labels, items):
        return super().forward(ids, labels) / items


def summed():
    _, (ids, labels) = tokens(None)

    def loss(model, logits, labels):
        return logits.square().sum() + functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )

    return Items(loss), (ids, labels, torch.tensor(7.0).double()), "sum"


def squared():
    return *tokens(lambda model, logits, labels: logits.square().sum()), "sum"


@pytest.mark.parametrize("name", ["summed", "squared"])
@pytest.mark.parametrize(("replicas", "micros"), [((1, 1), 4), ((2, 1), 3)])
def test_sum_over_samples_is_computed_if_the_factory_states_it(name, replicas, micros):
    found = trained(f"{HERE}:{name}", replicas, micros, "1f1b")
    assert_trained_alike(found, trained_by_torch(f"{HERE}:{name}", 1))


@pytest.mark.parametrize("name", ["squared", "two_terms", "by_class"])
def test_values_of_the_batch_are_sent_in_float64(name):
    _, inputs, captured = prepared(f"{HERE}:{name}")
    found = LossTerms(captured).values(inputs, BATCH).values()
    assert {each.dtype for each in found} == {torch.float64}


def test_stated_reduction_is_captured():
    assert captured_of(f"{HERE}:summed").loss.reduction == "sum"
    with pytest.raises(ValueError, match=r'sum over the samples, .* return module, inputs, "sum"'):
        captured_of(f"{HERE}:unstated")


def unstated():
    return summed()[:2]


def test_denominators_are_counted_per_sample():
    _, inputs, captured = prepared(f"{HERE}:two_terms")
    valid = (inputs[1] != -100).sum()
    terms = LossTerms(captured)
    assert [*terms.values(inputs, BATCH).values()] == [valid / BATCH, 1.0]
    assert not terms.reads


def test_labels_may_be_a_slice_of_a_larger_tensor():
    def flat(_, logits, labels):
        return functional.cross_entropy(logits.flatten(0, 1), labels.view(-1))

    module, (ids, labels) = tokens(flat)
    captured, wide = capture(module, (ids, labels)), torch.cat([labels, labels], 1)
    terms = LossTerms(captured)
    expected = terms.values([ids, labels], BATCH)
    assert terms.values([ids, wide[:, :LENGTH]], BATCH) == expected


def pseudo():
    """The model chooses its targets, so their number is unknown before the step."""

    def loss(model, logits, labels):
        target = logits.detach().argmax(-1)
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    return tokens(loss)


def ignoring():
    """Loss that ignores targets depending on the model's own results."""

    def loss(model, logits, labels):
        target = logits.detach().argmax(-1)
        target = torch.where(target > 0, target, -100)
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    return tokens(loss)


def test_unknown_number_of_targets_is_refused():
    with pytest.raises(BadData, match=r"the targets depend on trained parameters"):
        trained(f"{HERE}:ignoring", (1,), 2, "none")


def soft():
    """Loss whose targets are probabilities: a mean over the samples."""

    def loss(model, logits, labels):
        target = functional.one_hot(labels.clamp(min=0), CLASSES).to(logits.dtype)
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))

    return tokens(loss)


@pytest.mark.parametrize("name", ["pseudo", "soft"])
def test_other_losses_keep_their_mean(name):
    _, _, captured = prepared(f"{HERE}:{name}")
    assert not LossTerms(captured).sizes
