"""Times of pieces, with a clock that counts its readings."""

from functools import partial
from itertools import count

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpc3d.partition.capture import capture
from hpc3d.partition.profiles.one_rank_run import OneRankRun
from hpc3d.partition.profiles.piece_timer import PieceTimer
from tests.partition.execution.modules import HERE, called, prepared
from tests.partition.untraceable_models import HERE as UNTRACEABLE


def reading():
    """Clock that advances by one second per reading."""
    return count().__next__


def run_of(call):
    module, inputs, captured = prepared(f"{HERE}:{call}")
    return OneRankRun(captured, module, inputs, captured.batch, reading())


@pytest.fixture(scope="module")
def chain():
    return run_of("chain")


def test_every_operation_and_autograd_node_is_timed(chain):
    """A layer with tanh has a product, two gradient sums, and an autograd node."""
    forward, backward = PieceTimer(chain.captured, chain.clock).timed(
        chain.micro(4), chain.weights
    )
    nodes = [each.nodes for each in chain.captured.pieces]
    own = [name for (*_, name) in nodes if name.name.startswith("tanh")]
    layers = [place for place, each in enumerate(nodes) if each[0].name.startswith("linear")]
    assert len(own) == len(layers) == 4
    assert forward.tolist() == [len(each) for each in nodes]
    tanh = [place for place, each in enumerate(nodes) if each[-1] in own]
    assert {backward[place] for place in tanh} == {1.0}
    assert all(backward[place] >= 3 for place in layers)


class Masked(nn.Module):
    """Two layers whose results share a mask, which takes three operations."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.ones(4, 4).tril().sum(0)
        return (self.two(self.one(x) * mask) * mask).square().mean()


def masked():
    inputs = (torch.ones(3, 4),)
    return OneRankRun(capture(Masked(), inputs), Masked(), inputs, 3, reading())


def test_shared_copies_are_attributed_to_their_first_piece():
    run = masked()
    forward, _ = PieceTimer(run.captured, run.clock).timed(run.micro(3), run.weights)
    assert [len(piece.copies) for piece in run.captured.pieces][:4] == [0, 3, 0, 3]
    assert forward.tolist()[:4] == [1, 4, 1, 1]


def test_timed_gradients_match_the_module(chain):
    module, inputs, _ = prepared(f"{HERE}:chain")
    chain.trainer.parameters.grad.fill(0)
    PieceTimer(chain.captured, chain.clock).timed(chain.micro(12), chain.weights)
    _, loss = called(module, inputs)
    names = [name for name, each in chain.weights.items() if each.requires_grad]
    parameters = dict(module.named_parameters())
    expected = torch.autograd.grad(loss, [parameters[name] for name in names])
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(chain.weights[name].grad, value, 1e-12)


def test_readings_of_a_piece_are_combined_as_asked(chain):
    timer = PieceTimer(chain.captured, chain.clock, total=np.maximum)
    assert {*timer.timed(chain.micro(4), chain.weights).flat} == {0.0, 1.0}


@pytest.mark.parametrize("made", [masked, partial(run_of, "dropping")])
def test_pass_on_a_device_has_no_tensor_on_the_cpu(made, monkeypatch):
    """On torch's device `meta`, which refuses to compute with tensors of the CPU."""
    run, meta = made(), torch.device("meta")
    monkeypatch.setattr(OneRankRun, "device", meta)
    weights = {name: nn.Parameter(each.detach().to(meta)) for name, each in run.weights.items()}
    PieceTimer(run.captured, run.clock, run.device).timed(run.micro(3), weights)
    assert weights and all(each.grad.is_meta for each in weights.values())


def test_repeated_timing_is_the_same(chain):
    timer = PieceTimer(chain.captured, chain.clock)
    first, second = (timer.timed(chain.micro(4), chain.weights) for _ in range(2))
    assert (first == second).all() and first is not second


@pytest.mark.slow
def test_opaque_module_is_timed_as_one_piece():
    module, inputs, found = prepared(f"{UNTRACEABLE}:experts")
    run = OneRankRun(found, module, inputs, found.batch, reading())
    forward, backward = PieceTimer(found, run.clock).timed(run.micro(4), run.weights)
    places = [
        place for place, piece in enumerate(found.pieces) if piece.module in ("parts.0", "parts.1")
    ]
    assert len(places) == 2 and len(found.opaque) == 2
    assert all(forward[place] > 0 and backward[place] > 5 for place in places)
