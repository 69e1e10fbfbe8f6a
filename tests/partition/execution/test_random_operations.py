"""Random operations per sample: equal for every partition, and correctly distributed."""

import copy
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from hpc3d.config.input_file import Config
from hpc3d.partition.__main__ import main
from hpc3d.partition.capture import capture
from hpc3d.partition.execution.random_numbers import Draw, RandomNumbers
from hpc3d.partition.execution.random_operations import check_random_operations
from hpc3d.partition.execution.stage_program import stage_programs
from tests.partition.execution.modules import (
    CLIP,
    HERE,
    STEPS,
    prepared,
    torch_optimizer,
    trained,
)
from tests.partition.sample_models import Function


def programmed(function, shape=(400, 4), dtype=torch.float32):
    """Return `run(Draw, x)` of a module that applies a function to an input, as one part."""
    module = Function(lambda y, x: function(x) + 0 * y.sum())
    module.layer = nn.Linear(shape[-1], 1, dtype=dtype)
    captured = capture(module, (torch.ones(shape, dtype=dtype),))
    (program,) = stage_programs(captured, [range(len(captured.pieces))])
    weights = {
        name: torch.ones(captured.program.state_dict[name].shape, dtype=dtype)
        for name in program.weights
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
    """Tokens are in dimension 0, so the mask of a sample is that of its column."""
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
    """The kept probabilities are scaled by 1 / (1 - p); all values are 1, so rows sum to the kept
    fraction times this scale."""

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


def selected(names, telling):
    """Return all names; less important ones are slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in telling else slow) for name in names]


def stochastic_depth(x):
    """DropPath of timm and transformers, in both of their forms."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = x.new_empty(shape).bernoulli_(0.8).div_(0.8)
    other = 0.8 + torch.rand(shape, dtype=x.dtype, device=x.device)
    return x * mask + x.div(0.8) * other.floor_()


def in_columns(x):
    """Samples in dimension 1, and a column of a tensor that is filled in place."""
    y = x.T + torch.rand(x.shape[1], x.shape[0])
    y[0].normal_(2.0, 0.5)
    return y.T


def joined(x):
    """Two rows of a sample that are not contiguous."""
    both = functional.dropout(torch.cat([x, x]), 0.5)
    return both[: x.shape[0]] - 2 * both[x.shape[0] :]


def sampled(x):
    return torch.distributions.Normal(x, x.exp()).rsample()


FORMS = {
    "stochastic_depth": stochastic_depth,
    "in_columns": in_columns,
    "joined": joined,
    "sampled": sampled,
    "rand": lambda x: x + torch.rand(x.shape),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal": lambda x: (
        torch.normal(x, 0.5) + torch.normal(0.0, x.exp()) + torch.normal(x, x.exp())
    ),
    "normal_of_size": lambda x: x + torch.normal(1.0, 2.0, x.shape),
    "randint": lambda x: x + torch.randint(9, (x.shape[0], 1)) + torch.randint_like(x, 2, 5),
    "bernoulli": lambda x: torch.bernoulli(x) + torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x) + torch.zeros_like(x).bernoulli_(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "log_normal_": lambda x: x + torch.empty_like(x).log_normal_(0.0, 0.5),
    "cauchy_": lambda x: x + torch.empty_like(x).cauchy_().clamp_(-5, 5),
    "gumbel": lambda x: functional.gumbel_softmax(x) + functional.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: functional.rrelu(x - 0.5, training=True),
    "rrelu_": lambda x: functional.rrelu(x - 0.5, training=True, inplace=True),
    "alpha": lambda x: functional.alpha_dropout(x, 0.3, True),
    "feature_alpha": lambda x: functional.feature_alpha_dropout(x, 0.3, True),
    "channels_first": lambda x: functional.dropout1d(x.T[None])[0].T,
    "multinomial": lambda x: torch.multinomial(x, 2).to(x.dtype),
    "multinomial_again": lambda x: x + torch.multinomial(x, 4, True),
    "buffer": lambda x: x + torch.randn(x.shape[1]),
    "randperm": lambda x: x[:, torch.randperm(4)],
}


TELLING = ["stochastic_depth", "randn_like", "rand", "multinomial"]


@pytest.mark.parametrize("form", selected(FORMS, TELLING))
def test_random_operation_draws_by_sample(form):
    """Any rows of the batch are equal to those in the full batch, and steps differ."""
    run, x = programmed(FORMS[form], (40, 4)), torch.rand(40, 4)
    whole = run(Draw(1, 2, 0, 40), x)
    for first, stop in [(0, 7), (7, 25), (25, 40)]:
        part = run(Draw(1, 2, first, stop - first), x[first:stop])
        torch.testing.assert_close(part, whole[first:stop], rtol=0, atol=1e-7)
    assert run(Draw(1, 2, 0, 40), x).equal(whole)
    assert (run(Draw(1, 3, 0, 40), x) != whole).any()


# (function of a tensor of zeros, mean, variance) of an element
MOMENTS = {
    "uniform_": (lambda x: x.uniform_(-1, 3), 1, 4 / 3),
    "normal_": (lambda x: x.normal_(1, 2), 1, 4),
    "log_normal_": (lambda x: x.log_normal_(0.5, 0.25), 1.7011, 0.18663),
    "exponential_": (lambda x: x.exponential_(2), 1 / 2, 1 / 4),
    "bernoulli_": (lambda x: x.bernoulli_(0.3), 0.3, 0.21),
    "randint": (lambda x: torch.randint(2, 7, x.shape), 4, 2),
    "normal": (lambda x: torch.normal(x + 3, 0.5), 3, 0.25),
    "normal_of_size": (lambda x: torch.normal(3.0, 0.5, x.shape), 3, 0.25),
    "rrelu": (lambda x: functional.rrelu(x - 1, 0.1, 0.4, training=True), -0.25, 0.0075),
    "dropout": (lambda x: functional.dropout(x + 1, 0.2), 1, 0.25),
    "multinomial": (
        lambda x: torch.multinomial(x + torch.arange(1, 5), 1).expand(-1, 4),
        *(2, 1),
    ),
}


@pytest.mark.parametrize("name", selected(MOMENTS, ["normal_", "bernoulli_"]))
def test_random_operation_has_the_mean_and_variance_of_torch(name):
    function, mean, variance = MOMENTS[name]
    run = programmed(lambda x: function(x * 1).to(x.dtype), (5_000, 4))
    found = run(Draw(0, 0, 0, 5_000), torch.zeros(5_000, 4)).double()
    count = 5_000 if name == "multinomial" else 20_000
    assert abs(float(found.mean()) - mean) < 5 * (variance / count) ** 0.5
    assert abs(float(found.var()) / variance - 1) < 0.1


@pytest.mark.parametrize("function", [functional.alpha_dropout, functional.feature_alpha_dropout])
@pytest.mark.parametrize("in_place", [False, True])
def test_alpha_dropout_keeps_mean_and_variance(function, in_place):
    x = torch.randn(5_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    run = programmed(lambda x: function(x * 1, 0.3, True, in_place), x.shape, x.dtype)
    found = run(Draw(0, 0, 0, 5_000), x)
    assert abs(float(found.mean())) < 0.05 and abs(float(found.var()) - 1) < 0.05
    values, counts = found.unique(return_counts=True)
    assert abs(int(counts.max()) / 20_000 - 0.3) < 0.02
    kept = found != values[counts.argmax()]
    a = (0.7 * (1 + 0.3 * 1.7580993408473766**2)) ** -0.5
    expected = a * x + 0.3 * 1.7580993408473766 * a
    torch.testing.assert_close(found[kept], expected[kept], rtol=0, atol=1e-12)


@pytest.mark.parametrize("in_place", [False, True])
def test_slopes_of_rrelu_are_its_gradient(in_place):
    run = programmed(
        lambda x: functional.rrelu(x * 1, training=True, inplace=in_place), dtype=torch.float64
    )
    x = torch.linspace(-1, 1, 1600, dtype=torch.float64).view(400, 4).requires_grad_()
    run(Draw(0, 0, 0, 400), x).sum().backward()
    assert (x.grad[x > 0] == 1).all()
    slopes = x.grad[x <= 0]
    assert len(slopes.unique()) == 800 and 1 / 8 <= slopes.min() < slopes.max() < 1 / 3


KINDS = [functional.dropout, functional.alpha_dropout, functional.dropout1d]


@pytest.mark.parametrize("function", KINDS)
def test_rate_of_1_drops_everything(function):
    run = programmed(lambda x: function(x[:, None], 1.0, True)[:, 0])
    assert not run(Draw(0, 0, 0, 40), torch.ones(40, 4)).any()


def test_in_place_fill_keeps_the_memory_layout():
    """The memory layout decides which views of the result are possible."""

    def function(x):
        y = torch.rand_like(x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last))
        return y.permute(0, 2, 3, 1).view(x.shape)

    assert programmed(function, (40, 8))(Draw(0, 0, 0, 40), torch.ones(40, 8)).std() > 0


RARELY = 1e-12  # a rate that drops nothing


class Recurrent(nn.Module):
    """Outputs and states of recurrent layers, for [samples, time, width]."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        y, states = self.cell(x if self.cell.batch_first else x.transpose(0, 1))
        return y, *(states if isinstance(states, tuple) else (states,))


def run_of(module, x):
    captured = capture(module, (x,))
    (program,) = stage_programs(captured, [range(len(captured.pieces))])
    weights = {name: value.detach() for name, value in module.named_parameters()}
    _, found = program.run(Draw(0, 0, 0, len(x)), [], {captured.inputs[0]: x}, weights)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, how",
    [
        (nn.LSTM, {"bidirectional": True, "batch_first": True}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.GRU, {"bias": False}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)
def test_recurrent_layers_compute_what_torch_does(kind, how):
    torch.manual_seed(0)
    module = Recurrent(kind(4, 3, num_layers=3, **how)).double()
    x = torch.rand(6, 5, 4, dtype=torch.float64)
    expected = module(x)
    for rate in (RARELY, 0.5):
        module.cell.dropout = rate
        for ours, theirs in zip(run_of(module, x), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-9) == (rate == RARELY)


@pytest.mark.slow
def test_recurrent_layers_drop_different_elements():
    """Every layer is the identity, and there are two masks between three layers."""
    cell = nn.RNN(4, 4, num_layers=3, dropout=0.5, nonlinearity="relu", bias=False)
    for name, value in cell.named_parameters():
        nn.init.eye_(value.data) if "_ih_" in name else nn.init.zeros_(value.data)
    found = run_of(Recurrent(cell), torch.ones(500, 2, 4))[0]
    kept, count = found != 0, found.numel()
    assert (found[kept] == 4).all()
    assert abs(int(kept.sum()) / count - 0.25) < 5 * (0.25 * 0.75 / count) ** 0.5


@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, None), (True, 0.0)])
def test_attention_with_masked_rows_computes_what_torch_does(causal, scale):
    """A row without any key is 0, as in torch."""

    def attend(x, rate):
        mask = None if causal else torch.ones(4, 4, dtype=torch.bool).tril(-1)
        return functional.scaled_dot_product_attention(x, x, x, mask, rate, causal, scale=scale)

    x = torch.rand(6, 4, 4, dtype=torch.float64, requires_grad=True)
    run = programmed(lambda x: attend(x, RARELY), x.shape, x.dtype)
    found, expected = run(Draw(0, 0, 0, 6), x), attend(x, 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    gradients = [torch.autograd.grad((y**2).sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_inactive_random_operations_are_unchanged():
    """Torch's random numbers would differ in the second pass."""

    def function(x):
        return functional.rrelu(functional.alpha_dropout(x, 0.5, False) - 0.5)

    run, x = programmed(function), torch.rand(400, 4)
    assert run(Draw(0, 0, 0, 400), x).equal(function(x))


def permuted(x):
    return x[torch.randperm(x.shape[0])]


def numbered(x):
    return x + torch.randint(0, x.shape[0], x.shape)


def chosen(x):
    return x + torch.multinomial(x[:, 0], 4)


def counted(x):
    return torch.poisson(x)


def rotated(x):
    return torch.view_as_real(torch.randn(x.shape, dtype=torch.complex64)).sum(-1) + x


def lengthened(x):
    return torch.rand(x.shape[0] + 1, 4).sum() + x


@pytest.mark.parametrize(
    "function, problem",
    [
        (permuted, "randperm: aten.randperm relates the samples of the batch"),
        (numbered, "aten.randint relates the samples of the batch"),
        (chosen, "aten.multinomial relates the samples of the batch"),
        (counted, "aten.poisson draws random numbers that would depend on the partition"),
        (rotated, "aten.randn draws random numbers that would depend on the partition"),
        (lengthened, "aten.rand draws a number of rows that is not a multiple"),
    ],
)
def test_unsupported_random_operation_is_rejected(function, problem):
    """It is rejected when a model is planned, and when stages are built from an old plan."""
    module = Function(lambda y, x: function(torch.sigmoid(y)).sum())
    captured = capture(module, (torch.ones(8, 4),))
    parts = [range(len(captured.pieces))]
    for refused in (check_random_operations, lambda each: stage_programs(each, parts)):
        with pytest.raises(ValueError, match=f"{problem}.* \\(.*models.py:[0-9]+\\); (use|draw) "):
            refused(captured)
    allowed = function in (counted, rotated, lengthened)  # with torch's generator
    with nullcontext() if allowed else pytest.raises(ValueError, match=problem):
        check_random_operations(captured, redraw=False)


def counting():
    return Function(lambda y, x: torch.poisson(y.exp()).mean() + y.mean()), torch.ones(8, 4)


def test_planner_rejects_unsupported_random_operations(tmp_path, capsys):
    """Plans for torchrun are exempt, because their operations use torch's generator."""
    words = [f"{__name__}:counting", "--ranks", "1"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "poisson: aten.poisson draws random numbers that would depend on" in line
    path = tmp_path / "plan.py"
    assert main([*words, "-o", str(path)]) == 0
    assert "aten.poisson.default(" in path.read_text()


ARRANGEMENTS = [
    ((1, 1), 4, "1f1b", {}),
    ((2, 1), 3, "gpipe", {}),
    pytest.param((1, 2), 2, "1f1b", {"recompute": True}, marks=pytest.mark.slow),
    pytest.param((1, 3, 2), 1, "gpipe", {"recompute": True}, marks=pytest.mark.slow),
    pytest.param((1, 1), 4, "zb-h1", {}, marks=pytest.mark.slow),
    pytest.param((2, 2), 2, "interleaved", {"chunks": 2}, marks=pytest.mark.slow),
]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("noisy", "dropping")]


@pytest.mark.parametrize("name", ["diffusion", *SLOW])
@pytest.mark.parametrize("replicas, micros, schedule, how", ARRANGEMENTS)
def test_training_draws_the_same_numbers_on_every_split(name, replicas, micros, schedule, how):
    """Compares all kinds of stages, replicas and microbatches with one rank and one microbatch."""
    expected, losses = whole(name)
    for ours, seen in trained(f"{HERE}:{name}", replicas, micros, schedule, **how):
        np.testing.assert_allclose(seen, losses, rtol=1e-10)
        for key, value in ours.items():
            np.testing.assert_allclose(value, expected[key], 0, 1e-10, err_msg=key)


@cache
def whole(name):
    """Return (tensors by name, losses) of the module on one rank."""
    ((tensors, losses),) = trained(f"{HERE}:{name}", (1,), 1, "none")
    assert len({*losses}) == len(losses)
    return tensors, losses


@pytest.mark.parametrize("micros", [1, 3])
def test_training_with_noise_matches_torch_with_the_same_noise(micros):
    """Torch gets the random numbers of the operations as tensors."""
    module, (x,), captured = prepared(f"{HERE}:diffusion")
    module = copy.deepcopy(module)

    def noise(step, kind, shape):
        (name,) = (node.name for node in captured.program.graph.nodes if node.name == kind)
        numbers = RandomNumbers(name, Draw(Config().seed, step, 0, len(x)), 0, torch.float64)
        return getattr(numbers, {"randn": "normal", "rand": "uniform"}[kind])(shape)

    torch_losses = []
    optimizer = torch_optimizer([*module.parameters()])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = module.loss(x, noise(step, "randn", x.shape), noise(step, "rand", [len(x), 1]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        torch_losses.append(loss.item())
    for ours, losses in trained(f"{HERE}:diffusion", (1, 2), micros, "1f1b"):
        np.testing.assert_allclose(losses, torch_losses, rtol=1e-9)
        for name, parameter in module.named_parameters():
            if name in ours:
                np.testing.assert_allclose(ours[name], parameter.detach(), 0, 1e-9)


@pytest.mark.slow
def test_dropout_changes_training():
    ((dry, _),) = trained(f"{HERE}:chain", (1,), 1, "none")
    assert any((dry[key] != whole("dropping")[0][key]).any() for key in dry)
