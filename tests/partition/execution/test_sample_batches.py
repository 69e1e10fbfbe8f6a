"""The samples of a rank, and how the rank obtains them."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hpc3d.comm.threads import run
from hpc3d.partition.capture import capture
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.sample_batches import (
    SampleLoader,
    flat_inputs,
    rows_of,
    shared_by_root,
)
from tests.partition.execution.modules import HERE, prepared
from tests.partition.sample_models import HERE as SAMPLES


@pytest.mark.parametrize(("batch", "micros", "replicas"), [(12, 3, 2), (13, 4, 3), (5, 1, 1)])
def test_every_sample_is_assigned_once(batch, micros, replicas):
    parts = [[*rows_of(batch, micros, replicas, replica)] for replica in range(replicas)]
    in_order = [row for micro in zip(*parts, strict=True) for rows in micro for row in rows]
    assert in_order == [*range(batch)]
    assert {len(rows) for replica in parts for rows in replica} <= {
        batch // micros // replicas,
        batch // micros // replicas + 1,
    }


def test_named_inputs_follow_the_order_of_the_model():
    _, _, captured = prepared(f"{SAMPLES}:by_name")
    x = torch.ones(4, 4)
    assert flat_inputs(captured, {"scale": 2.0, "x": x}) == [x, 2.0]


def test_nested_inputs_are_flattened():
    _, _, captured = prepared(f"{HERE}:chain")
    assert flat_inputs(captured, ([{"a": (2,)}], 4)) == [2, 4]
    with pytest.raises(ValueError, match=r"3 inputs were given, .* takes x, y"):
        flat_inputs(captured, ([1, {"a": 2}], 3))


def test_nested_dicts_may_have_any_order():
    class Difference(torch.nn.Module):
        def forward(self, pair):
            return pair["one"] - 2 * pair["two"]

    captured = capture(
        Difference(), ({"one": torch.zeros(4, 2), "two": torch.zeros(4, 3)[:, :2]},)
    )
    assert flat_inputs(captured, ({"two": 2, "one": 1},)) == [1, 2]
    with pytest.raises(ValueError, match="the given inputs are one, three, but the model takes"):
        flat_inputs(captured, ({"one": 1, "three": 3},))


def test_inputs_have_the_containers_of_the_factory():
    """Otherwise, values would be assigned to arguments in another order than by PyTorch."""
    _, _, named = prepared(f"{SAMPLES}:by_name")
    _, _, chain = prepared(f"{HERE}:chain")
    for captured, inputs, line in (
        (named, (torch.ones(4, 4), 2.0), "the inputs are a tuple; return a dict, as the factory"),
        (chain, {"x": 1, "y": 2}, "the inputs are a dict; return a tuple, as the factory does"),
    ):
        with pytest.raises(ValueError, match=line):
            flat_inputs(captured, inputs)


def test_nested_inputs_have_the_containers_of_the_factory():
    class Difference(torch.nn.Module):
        def forward(self, named, listed):
            return named["one"] - 2 * named["two"] + listed[0] * listed[1]

    x = torch.zeros(4, 2)
    captured = capture(Difference(), ({"one": x, "two": x}, [x, x]))
    assert flat_inputs(captured, ({"one": 1, "two": 2}, (3, 4))) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="contain a list instead of a dict; return the same"):
        flat_inputs(captured, ([1, 2], [3, 4]))
    with pytest.raises(ValueError, match="contain a dict instead of a tuple or list; return the"):
        flat_inputs(captured, ({"one": 1, "two": 2}, {"a": 3, "b": 4}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64, torch.bfloat16])
def test_all_ranks_receive_the_tensor_of_the_first(dtype):
    tensor = (torch.arange(6) % 2).reshape(2, 3).to(dtype)

    def rank(mesh):
        mine = tensor.T.contiguous().T if mesh.rank == 0 else None
        return shared_by_root(mesh.world, mine, tensor.shape, dtype)

    for found in run({"d": 3}, rank):
        assert found.dtype == dtype and (found == tensor).all()


def test_microbatch_has_its_rows_and_its_share_of_the_mean():
    _, inputs, captured = prepared(f"{HERE}:chain")

    def rank(mesh):
        batches = (lambda step: [each + step for each in inputs]) if mesh.rank == 0 else None
        rows = rows_of(12, 2, 2, mesh.rank)
        return SampleLoader(mesh, LossTerms(captured), batches, rows, 12, captured.inputs).fetch(
            5, factor=3.0
        )

    first, second = run({"d": 2}, rank)
    for micros, starts in ((first, (0, 6)), (second, (3, 9))):
        for micro, start in zip(micros.values(), starts, strict=True):
            assert (micro.step, micro.first, micro.samples) == (5, start, 3)
            assert micro.scale == 3.0 / 12
            for node, whole in zip(captured.inputs, inputs, strict=True):
                np.testing.assert_array_equal(micro.inputs[node], whole[start : start + 3] + 5)
