"""Programs for parts of captured modules: together they compute the same as the module."""

import copy
from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

import torch
from torch.nn import functional

from hpc3d.partition.atom_graph import Atom, Value, contracted
from hpc3d.partition.capture import capture, outputs_of
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.sample_batches import flat_inputs
from hpc3d.partition.execution.stage_program import graded, on_device, size_of, stage_programs
from hpc3d.partition.execution.torch_weights import values_in
from tests.partition.execution.modules import HERE, prepared
from tests.partition.sample_models import HERE as SAMPLES
from tests.partition.sample_models import Function
from tests.partition.untraceable_models import HERE as UNTRACEABLE
from tests.strided import strided

slow = pytest.mark.slow


def convex_parts(captured, count):
    """Split pieces into parts such that values only flow forward."""
    atoms = [Atom((number,), 0.0, 0.0) for number in range(len(captured.pieces))]
    values = [
        Value(captured.piece_of[node], readers, 1.0) for node, readers in captured.readers.items()
    ]
    graph = contracted(atoms, values)
    size, count = len(graph), min(count, len(graph))
    ends = [size * part // count for part in range(count + 1)]
    return [
        [piece for atom in graph.atoms[first:stop] for piece in atom.ids]
        for first, stop in pairwise(ends)
    ]


def outputs_of_parts(module, inputs, captured, count):
    """Return (programs, their outputs, their weights by name)."""
    programs = stage_programs(captured, convex_parts(captured, count))
    weights = {name: value.clone() for name, value in values_in(module, captured)}
    for name, parameter in module.named_parameters():
        if name in weights:
            weights[name].requires_grad_(parameter.requires_grad)
    given = dict(zip(captured.inputs, flat_inputs(captured, inputs), strict=True))
    crossing, found = (), {}
    for program in programs:
        draw = Draw(0, 0, 0, captured.batch)
        received = [each.contiguous() for each in crossing]  # as in messages
        crossing, outputs = program.run(draw, received, given, weights)
        found.update(zip(program.outputs, outputs, strict=True))
    assert crossing == ()
    return programs, [found[node] for node in outputs_of(captured)], weights


@pytest.mark.parametrize(
    "name", [f"{HERE}:noisy", pytest.param("inputs.partition.translation:small", marks=slow)]
)
def test_program_creates_its_tensors_on_its_device(name):
    """Torch's device `meta` refuses to compute with tensors on the CPU."""
    module, inputs, captured = prepared(name)
    (program,) = stage_programs(captured, [range(len(captured.pieces))])
    meta = torch.device("meta")
    weights = {name: value.to(meta) for name, value in values_in(module, captured)}
    flat = [value.to(meta) for value in flat_inputs(captured, inputs)]
    given = dict(zip(captured.inputs, flat, strict=True))
    draw = Draw(0, 0, 0, captured.batch, device=meta)
    _, outputs = on_device(program, meta).run(draw, (), given, weights)
    assert {each.device for each in outputs} == {meta}
    with pytest.raises(RuntimeError, match="meta"):
        program.run(draw._replace(device="cpu"), (), given, weights)


def expected_of(module, inputs):
    module = copy.deepcopy(module)
    found = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    return module, [*found.values()] if isinstance(found, dict) else [found]


def assert_computes_the_same(module, inputs, captured, count):
    programs, outputs, weights = outputs_of_parts(module, inputs, captured, count)
    whole, expected = expected_of(module, inputs)
    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    sum(each.sum() for each in outputs if each.requires_grad).backward()
    sum(each.sum() for each in expected if each.requires_grad).backward()
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                weights[name].grad, parameter.grad, rtol=1e-10, atol=1e-10, msg=name
            )
    for name, buffer in whole.named_buffers():
        if name in weights:
            torch.testing.assert_close(weights[name], buffer, rtol=1e-12, atol=1e-12, msg=name)
    return programs


MODELS = [f"{HERE}:everything", f"{HERE}:chain"]
MODELS += [
    f"{SAMPLES}:{name}" for name in ("branches", "by_name", "counts", "repeats", "untaught")
]
LONG = [f"{SAMPLES}:copies_of_a_layer"]
LONG += [f"{UNTRACEABLE}:{name}" for name in ("three", "experts", "straight")]
MODELS += [pytest.param(name, marks=pytest.mark.slow) for name in LONG]


@pytest.mark.parametrize("count", strided([1, 2, 3, 100], 2, 1))
@pytest.mark.parametrize("name", MODELS)
def test_stage_programs_compute_what_the_module_does(name, count):
    """Compares outputs, gradients and buffers, also if every part is one atom."""
    assert_computes_the_same(*prepared(name), count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5, 1000])
@pytest.mark.parametrize("name", ["bert", "resnet", "unet", "densenet", "translation"])
def test_stage_programs_of_models_compute_what_they_do(name, count):
    assert_computes_the_same(*prepared(f"inputs.partition.{name}:small"), count)


def from_memory(y, x):
    """Constants are written to a row of a tensor, and values of the batch to a column."""
    constant, column = torch.zeros(4, dtype=x.dtype), torch.zeros_like(x)
    constant.fill_(2.0)
    constant[1] = 5
    column[:, 0] = x[:, 1] * 3
    return (y * constant + x * column).sum()


def test_in_place_writes_are_visible_to_later_stages():
    module, inputs = Function(from_memory).double(), (torch.rand(6, 4).double(),)
    for count in (1, 2, 100):
        assert_computes_the_same(module, inputs, capture(module, inputs), count)


def test_received_value_has_its_captured_strides():
    """The result of attention is stored by tokens, so that a view can merge its heads."""

    def attention(y, x):
        heads = y.view(-1, 2, 2, 2).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads)
        return mixed.transpose(1, 2).contiguous().view(-1, 2, 4).square().mean()

    module, inputs = Function(attention).double(), (torch.rand(6, 2, 4).double(),)
    captured = capture(module, inputs)
    (program, _) = assert_computes_the_same(module, inputs, captured, 2)
    assert [node.name for node in program.sent] == ["scaled_dot_product_attention"]


def test_border_passes_on_values_that_later_stages_need():
    """The last part of a chain of three also reads the first value, which is passed on."""

    def function(y, x):
        return functional.gelu(torch.tanh(y)) + y

    module, inputs = Function(function).double(), (torch.rand(6, 4).double(),)
    programs = assert_computes_the_same(module, inputs, capture(module, inputs), 100)
    received = [[node.name for node in program.received] for program in programs]
    assert received == [[], ["linear"], ["linear", "tanh"], ["linear", "gelu"]]
    for one, other in pairwise(programs):
        assert one.sent == other.received
    assert [program.weights for program in programs][1:] == [(), (), ()]


def test_values_without_gradient_are_detected():
    """In `everything`: integers, a comparison, and values that depend on no parameter."""
    _, _, captured = prepared(f"{HERE}:everything")
    programs = stage_programs(captured, convex_parts(captured, 100))
    crossing = {node for program in programs for node in program.sent}
    found = {node.name for node in crossing - graded(captured, programs)}
    assert found <= {"gt", "unsqueeze"} and "embedding" in {node.name for node in crossing}


def test_value_that_flows_backward_is_rejected():
    _, _, captured = prepared(f"{HERE}:chain")
    pieces = [*range(len(captured.pieces))]
    with pytest.raises(ValueError, match="chunk 0 reads linear, which the later chunk 1 computes"):
        stage_programs(captured, [pieces[1:], pieces[:1]])


def test_reshape_sizes_scale_with_the_batch():
    captured = capture(Function(lambda y, x: y.reshape(-1, 2)), (torch.rand(6, 4),))
    (node,) = (node for node in captured.program.graph.nodes if "reshape" in node.name)
    assert [size_of(size, 10) for size in node.meta["val"].shape] == [20, 2]
