"""Which weights are split, and along which dimension."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from hpc3d.partition.capture import capture, outputs_of
from hpc3d.partition.tensor_parallel.propagation import sharding_of
from hpc3d.partition.tensor_parallel.shards import SplitDim
from tests.partition.execution.modules import prepared
from tests.partition.tensor_parallel.modules import HERE


class Of(nn.Module):
    """Named layers, and a function of them and of the inputs that returns values for the loss."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, *inputs):
        return self.function(self.layers, *inputs).square().mean()


def linear(**sizes):
    return {name: nn.Linear(*size) for name, size in sizes.items()}


def splits(function, *inputs, ways=2, **layers):
    """Return {weight: (dim, sections)} of a model whose last layer is by far the largest."""
    layers["padding"] = nn.Linear(100, 1000, bias=False)
    inputs = inputs or (torch.zeros(6, 8),)

    def padded(found, *given):
        made = function(found, *given)
        return made + 0 * (found["padding"].weight * found["padding"].weight.sum()).sum()

    captured = capture(Of(padded, **layers), inputs)
    found = sharding_of(captured, ways, outputs_of(captured)).weights
    return {name.removeprefix("layers."): tuple(split)[:2] for name, split in found.items()}


def test_pairs_of_linear_layers_are_split_by_columns_and_rows():
    layers = linear(a=(8, 16), b=(16, 8), c=(8, 6), d=(6, 2))
    found = splits(lambda n, x: n["d"](n["c"](torch.relu(n["b"](n["a"](x).tanh())))), **layers)
    assert found == {
        "a.weight": (0, (16,)),
        "a.bias": (0, (16,)),
        "b.weight": (1, (16,)),
        "c.weight": (0, (6,)),
        "c.bias": (0, (6,)),
        "d.weight": (1, (6,)),
    }


def test_fused_projections_have_sections_of_heads():
    """Queries of four heads, and keys and values of two."""

    def attention(n, x):
        q, k, v = n["qkv"](x).split([8, 4, 4], -1)
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return n["out"](
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )

    found = splits(attention, torch.zeros(6, 3, 8), **linear(qkv=(8, 16), out=(8, 8)))
    assert found["qkv.weight"] == (0, (8, 4, 4)) and found["out.weight"] == (1, (8,))
    assert not splits(attention, torch.zeros(6, 3, 8), ways=4, **linear(qkv=(8, 16), out=(8, 8)))


def test_slices_of_a_fused_layer_are_sections():
    def gated(n, x):
        y = n["up"](x)
        return n["down"](y[:, :6].sigmoid() * y[:, 6:])

    found = splits(gated, **linear(up=(8, 12), down=(6, 8)))
    assert found["up.weight"] == found["up.bias"] == (0, (6, 6))


@pytest.mark.parametrize(
    "function",
    [
        lambda n, x: n["b"](n["a"](x).softmax(-1)),
        lambda n, x: n["b"](n["a"](x).flip(-1)),
        lambda n, x: n["b"](n["a"](x).cumsum(-1) + n["a"].weight.sum()),
        lambda n, x: n["b"](n["a"](x) + x.repeat(1, 2)),
        lambda n, x: n["b"](n["a"](x).relu_()),
        lambda n, x: n["c"](n["c"](x).tanh()),
    ],
)
def test_layers_between_which_all_columns_are_needed_are_replicated(function):
    assert not splits(function, **linear(a=(8, 16), b=(16, 8), c=(8, 8)))


def test_transposed_weight_is_split_as_the_weight():
    found = splits(lambda n, x: n["a"](x) @ n["a"].weight, **linear(a=(8, 16)))
    assert found == {"a.weight": (0, (16,)), "a.bias": (0, (16,))}


def test_mask_without_heads_is_used_for_grouped_queries():
    def attention(n, x):
        q, k, v = (n[name](x).unflatten(-1, (-1, 2)).transpose(1, 2) for name in "qkv")
        mask = x.new_ones(3, 3).tril().bool()
        y = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return n["out"](y.transpose(1, 2).flatten(2))

    layers = linear(q=(8, 8), k=(8, 4), v=(8, 4), out=(8, 8))
    found = splits(attention, torch.zeros(6, 3, 8), **layers)
    assert found["q.weight"] == (0, (8,)) and found["k.weight"] == (0, (4,))


def test_elementwise_operations_with_two_results_are_replicated():
    layers = linear(a=(8, 16), b=(16, 8))
    assert not splits(lambda n, x: n["b"](torch.frexp(n["a"](x)).mantissa), **layers)


def test_odd_sizes_are_replicated():
    assert not splits(lambda n, x: n["b"](n["a"](x)), **linear(a=(8, 15), b=(15, 8)))


def test_values_that_other_stages_read_end_a_pair():
    """Weights that are large enough are split without a partner."""
    _, _, captured = prepared(f"{HERE}:mlp")
    crossing = [node for node in captured.program.graph.nodes if "gelu" in node.name]
    names = {"up.0.weight", "up.0.bias", "down.0.weight", "up.1.weight", "up.1.bias"}
    assert {*sharding_of(captured, 2).weights} == names | {"down.1.weight"}
    found = sharding_of(captured, 2, crossing)
    assert {split.dim for split in found.weights.values()} == {0}
    assert not {*crossing} & {*found.made}


def test_large_tables_and_heads_are_split_by_rows():
    for tied in (False, True):
        _, _, captured = prepared(f"{HERE}:transformer(tied={tied})")
        found = sharding_of(captured, 2, outputs_of(captured))
        tables = {name for name in found.weights if name in ("tokens.weight", "head.weight")}
        assert tables == {"tokens.weight"} if tied else {"tokens.weight", "head.weight"}
        assert {found.weights[name] for name in tables} == {SplitDim(0, (24,))}
        assert "places.weight" not in found.weights
