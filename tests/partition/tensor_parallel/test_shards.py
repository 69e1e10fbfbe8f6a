"""Conversions between full tensors and shards, and their gradients."""

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.comm import threads
from hpc3d.partition.tensor_parallel import shards
from hpc3d.partition.tensor_parallel.shards import SplitDim

FULL = torch.arange(24, dtype=torch.float64).view(4, 6)
SPLIT = SplitDim(1, (2, 4))
OWN = [FULL[:, [0, 2, 3]], FULL[:, [1, 4, 5]]]  # half of each section


def on_ranks(function):
    """Return [(result, gradient of the argument)] of function(rank, ranks, tensor), for two ranks.

    The gradient of the result on rank r is the result times r + 1.
    """

    def rank(mesh):
        ranks = mesh.comm("x")
        argument, call = function(ranks.rank, ranks)
        argument = argument.clone().requires_grad_()
        made = call(argument)
        made.backward(made.detach() * (ranks.rank + 1))
        return made.detach(), argument.grad

    return threads.run({"x": 2}, rank)


def test_gathered_shards_are_the_full_tensor():
    found = on_ranks(lambda rank, ranks: (OWN[rank], lambda x: shards.gathered(x, SPLIT, ranks)))
    for rank, (made, gradient) in enumerate(found):
        assert torch.equal(made, FULL)
        assert torch.equal(gradient, OWN[rank] * (rank + 1))


def test_narrowed_tensor_is_the_shard_of_the_rank():
    found = on_ranks(lambda rank, ranks: (FULL, lambda x: shards.narrowed(x, SPLIT, ranks)))
    both = torch.empty_like(FULL)
    both[:, [0, 2, 3]], both[:, [1, 4, 5]] = OWN[0], 2 * OWN[1]
    for rank, (made, gradient) in enumerate(found):
        assert torch.equal(made, OWN[rank])
        assert torch.equal(gradient, both)


def test_reduced_tensor_is_the_sum():
    found = on_ranks(lambda rank, ranks: (OWN[rank], lambda x: shards.reduced(x, ranks)))
    for rank, (made, gradient) in enumerate(found):
        assert torch.equal(made, OWN[0] + OWN[1])
        assert torch.equal(gradient, (OWN[0] + OWN[1]) * (rank + 1))


def test_gradient_of_a_copied_tensor_is_the_sum():
    for made, gradient in on_ranks(lambda rank, ranks: (FULL, lambda x: shards.copied(x, ranks))):
        assert torch.equal(made, FULL)
        assert torch.equal(gradient, 3 * FULL)


@pytest.mark.parametrize("padding", [-1, 2, -3])
def test_rows_of_a_split_table_are_those_of_the_full_table(padding):
    rows = torch.tensor([[3, 0], [2, 1]])

    def looked_up(rank, ranks):
        table = FULL[2 * rank : 2 * rank + 2]
        return table, lambda own: shards.looked_up(own, rows, padding, 4, ranks)

    table = FULL.clone().requires_grad_()
    expected = torch.embedding(table, rows, padding if padding != -3 else 1)
    expected.backward(expected.detach())
    for rank, (made, gradient) in enumerate(on_ranks(looked_up)):
        assert torch.equal(made, expected)
        assert torch.equal(gradient, table.grad[2 * rank : 2 * rank + 2] * (rank + 1))
