"""Sharding rules of operations."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpc3d.partition.capture import capture
from hpc3d.partition.tensor_parallel.shard_rules import rule_of, transposed


class Transposing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 8))

    def forward(self, x):
        y = x @ self.weight.t()
        z = y @ self.weight.t().transpose(0, 1)
        return z.relu().flip(1).square().mean()


def nodes(name):
    graph = capture(Transposing(), (torch.zeros(6, 8),)).program.graph
    return [node for node in graph.nodes if name in str(node.target)]


@pytest.mark.parametrize(("name", "has_rule"), [("relu", True), ("matmul", True), ("flip", False)])
def test_operations_with_a_rule(name, has_rule):
    assert all((rule_of(node) is not None) == has_rule for node in nodes(name))


def test_chain_of_transpositions_has_the_order_of_its_dimensions():
    once, twice = [node.args[1] for node in nodes("matmul")]
    (weight, first), (source, second) = transposed(once), transposed(twice)
    assert weight is source and weight.op == "placeholder"
    assert (first, second) == ([1, 0], [0, 1])
