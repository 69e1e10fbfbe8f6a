"""Chunks of a module in evaluation mode, and modules whose evaluation uses other stages."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpc3d.partition.capture import capture, is_trained, state_of
from hpc3d.partition.execution.evaluation_model import evaluation_lines, evaluation_model
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_weights import stored_tensors
from hpc3d.partition.factory import made_with_data
from tests.partition.execution.modules import even_parts
from tests.partition.execution.test_module_evaluator import HERE as EVALUATED
from tests.partition.execution.test_module_evaluator import Blocks, inputs_of
from tests.partition.untraceable_models import HERE as UNTRACEABLE

HERE = "tests.partition.execution.test_evaluation_model"


def body(model, y, x):
    return torch.tanh(y) + x


def turned():
    """Module whose layers have a different order than in training."""

    class Turned(Blocks):
        def forward(self, x, labels):
            for layer in self.layers if self.training else reversed(self.layers):
                x = torch.tanh(layer(x))
            return nn.functional.cross_entropy(x, labels)

    return Turned(body).double(), inputs_of(0)


def without_loss():
    class Predicting(Blocks):
        def forward(self, x, labels):
            return super().forward(x, labels) if self.training else self.layers[0](x)

    return Predicting(body).double(), inputs_of(0)


def merging():
    """Weights that the method `eval` merges, as in implementations of LoRA."""

    class Merging(nn.Linear):
        def train(self, mode=True):
            if not mode:
                self.weight.data += self.weight.data
            return super().train(mode)

    return Blocks(body, lambda: Merging(4, 4)).double(), inputs_of(0)


def masked_by_norm():
    """Mask that depends on running statistics."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)

        def forward(self, x, labels):
            mask = (self.norm(x) > 0).double()
            return (self.layer(x).square() * mask).sum() / mask.sum()

    return Masked().double(), inputs_of(0)


def evaluated(name, stages=2):
    """Return (training, evaluation) of a module in float64 on several stages."""
    module, inputs = made_with_data(name, 0)
    captured = capture(copy.deepcopy(module), inputs)
    parts = even_parts(captured, stages)
    model = staged_model(captured, parts, (1,) * stages, (False,) * stages)
    return model, evaluation_model(name, model, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        f"{EVALUATED}:double('dropping')",
        f"{EVALUATED}:double('skipping')",
        f"{UNTRACEABLE}:three",
    ],
)
def test_chunks_read_the_weights_that_they_read_in_training(name):
    model, found = evaluated(name, 3)
    state = state_of(model.captured)
    for ours, theirs in zip(found.programs, model.programs, strict=True):
        trained = [
            {name for name in each.weights if name in state and is_trained(state[name])}
            for each in (ours, theirs)
        ]
        assert trained[0] == trained[1]
    assert [*evaluation_lines(found, model)] == [f"evaluation loss: {found.captured.loss.text}"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "turned",
            r"linear.* reads layers\.\d\.\w+ on a different pipeline stage than in training",
        ),
        pytest.param("without_loss", "the model must return its loss", marks=pytest.mark.slow),
        pytest.param("merging", "eval of the module raised ValueError", marks=pytest.mark.slow),
    ],
)
def test_module_with_other_stages_in_evaluation_is_refused(name, line):
    with pytest.raises(ValueError, match=f"^train.eval_every: in evaluation mode, .*{line}"):
        evaluated(f"{HERE}:{name}")


def test_parameters_that_only_evaluation_reads_are_constants_on_all_stages():
    model, found = evaluated(f"{EVALUATED}:double('calibrated')")
    assert all("scales" in program.weights for program in found.programs)
    assert model.owners["scales"] == (0,)
    assert stored_tensors(model.captured)["frozen"] == ["scales"]


@pytest.mark.slow
def test_parameters_that_only_training_reads_are_named():
    model, found = evaluated(f"{EVALUATED}:double('auxiliary')")
    assert [*evaluation_lines(found, model)][1:] == [
        "evaluation does not use second.weight and 1 more parameter"
    ]


def averaging():
    """Buffer that training modifies, and only evaluation reads."""

    class Averaging(Blocks):
        def forward(self, x, labels):
            if self.training:
                self.decayed.mul_(0.9).add_(0.1)
                return super().forward(x, labels)
            return super().forward(x + self.decayed, labels)

    module = Averaging(body).double()
    module.register_buffer("decayed", torch.zeros(4, dtype=torch.float64))
    return module, inputs_of(0)


def test_buffers_that_microbatches_update_and_evaluation_reads_are_named():
    model, found = evaluated(f"{HERE}:averaging", 1)
    assert [*evaluation_lines(found, model)][1:] == [
        "buffer decayed: updated by each microbatch, not once per step as in torch, and read by "
        "the evaluation"
    ]


@pytest.mark.slow
def test_values_that_training_changes_are_not_computed_from_the_initial_weights():
    _, found = evaluated(f"{HERE}:masked_by_norm", 1)
    assert not LossTerms(found.captured).sizes
    assert LossTerms(found.captured._replace(changing=())).sizes
