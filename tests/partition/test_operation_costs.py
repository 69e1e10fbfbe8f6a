"""Costs of operations, compared with torch's FLOP counter and with formulas."""

import importlib
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

from hpc3d.partition.capture import capture, captured_of
from hpc3d.partition.factory import made_with_data
from hpc3d.partition.operation_costs import Operations
from hpc3d.predict.machine.machine import Link, Machine, Rates
from tests.partition.sample_models import HERE, captured, small
from tests.partition.untraceable_models import HERE as UNTRACEABLE
from tests.partition.user_models import Base, ready

SLOW = 1e-30  # what it counts of bytes
FLOP = Machine(
    "flop",
    "one second a floating-point operation, none a byte",
    ranks_per_node=8,
    cores=1,
    memory_gb=1.0,
    memory_bandwidth=1 / SLOW,
    launch_s=0.0,
    gemm={"float32": Rates(1.0, (1.0,), (1.0,))},
    links=(Link(0, 0.0, 1.0),),
)

BYTES = replace(FLOP, memory_bandwidth=1.0)


def counted(module, inputs):
    """Return torch's FLOP count of a forward and backward pass with data."""
    with FlopCounterMode(display=False) as counter:
        module(*inputs).sum().backward()
    return counter.get_total_flops()


def total(captured, batch):
    found = Operations(captured).costs(FLOP, batch).values()
    return sum(each.forward for each in found), sum(each.backward for each in found)


@pytest.mark.parametrize("name", ["mlp", pytest.param("resnet", marks=pytest.mark.slow), "unet"])
def test_flops_match_the_torch_counter(name):
    module, inputs = importlib.import_module(f"inputs.partition.{name}").small()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    expected = counted(module, inputs)
    forward, backward = total(small(name), len(inputs[0]))
    assert forward + backward == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_opaque_module_flops_match_the_torch_counter():
    name = f"{UNTRACEABLE}:of('Choosy', 'Experts')"
    found, (module, inputs) = captured_of(name), made_with_data(name, 0)
    assert found.opaque
    assert sum(total(found, 12)) == pytest.approx(counted(module, inputs), rel=1e-9)
    assert sum(total(found, 24)) == pytest.approx(2 * counted(module, inputs), rel=1e-9)


def test_opaque_module_saves_its_inputs_and_results():
    """Choosy runs with data; it saves its input of 4 float32 numbers, and the result of tanh."""
    found = captured_of(f"{UNTRACEABLE}:of('Choosy')")
    saved = {node.name: each.saved for node, each in Operations(found).costs(FLOP, 6).items()}
    (opaque,) = found.opaque
    assert 0 < opaque.call.saved <= 16
    assert saved["clone"] == 6 * 16
    assert saved["parts_0"] == pytest.approx(6 * (opaque.call.saved + 16)), "gelu reads linear_1"


def test_data_type_without_rates_is_refused_with_a_remedy():
    found = capture(*ready(Base()))
    line = r"no GEMM rates for float64, .* of linear \(.*user_models.py:\d+\); .* pass --profile"
    with pytest.raises(ValueError, match=line):
        Operations(found).costs(FLOP, 8)


@pytest.mark.slow
def test_attention_flops_follow_the_formula():
    """BERT has 4 layers, 4 heads of 8 and 8 x 16 tokens; torch counts its other products."""
    attention = 4 * 4 * 8 * 4 * 16 * 16 * 8
    rows, tokens, hidden, vocabulary = 8, 8 * 16, 32, 64
    products = 4 * 2 * tokens * 12 * hidden**2 + 2 * tokens * (hidden**2 + hidden * vocabulary)
    products += 2 * rows * (hidden**2 + 2 * hidden)
    forward, backward = total(small("bert"), 8)
    assert forward == pytest.approx(products + attention, rel=1e-9)
    assert backward == pytest.approx(2 * products + 2.5 * attention, rel=1e-9)


@pytest.mark.slow
def test_half_the_batch_costs_half():
    whole, half = (total(small("bert"), batch) for batch in (8, 4))
    assert half == pytest.approx([each / 2 for each in whole], rel=1e-9)


def test_saved_values_count_once():
    """Linear and GELU save their inputs, except the model's input, and no weights."""
    found = Operations(small("mlp")).costs(FLOP, 16)
    assert sum(each.saved for each in found.values()) == 11 * 16 * 64 * 4


def test_einsum_flops_match_the_torch_counter():
    """einsum maps [b, 4] and [b, 4] to [b], for 4 samples, after a layer."""
    forward, _ = total(captured(f"{HERE}:contracts"), 4)
    assert forward == 2 * 4 * 4 * 4 + 2 * 4 * 4


def test_copy_moves_bytes_and_a_view_does_not():
    found = Operations(captured(f"{HERE}:repeats")).costs(BYTES, 4)
    seconds = {node.name: each.forward for node, each in found.items()}
    assert seconds["unsqueeze"] == seconds["expand"] == 0
    assert seconds["reshape"] == pytest.approx(2 * 4 * 16 * 4)


def test_half_of_the_backward_products_are_weight_gradients():
    """The first layer, whose input needs no gradient, has only the weight gradient."""
    found = Operations(small("mlp")).costs(FLOP, 16)
    layers = [each for node, each in found.items() if "linear" in node.name]
    product = 2 * 16 * 64 * 64
    assert [each.weight for each in layers] == pytest.approx([product] * 6)
    assert [each.backward for each in layers] == pytest.approx([product] + [2 * product] * 5)
    others = [each for node, each in found.items() if "linear" not in node.name]
    assert not any(each.weight for each in others)


def test_only_product_weights_delay_their_gradients():
    """A table and a normalization have them at once; those of three layers and of a product with
    the table's transpose are delayed."""
    found = Operations(captured("tests.partition.execution.modules:everything")).costs(FLOP, 12)
    waiting = {
        node.name: each.weight / each.backward for node, each in found.items() if each.weight
    }
    assert waiting == {name: 0.5 for name in ("linear", "linear_1", "linear_2", "matmul")}
