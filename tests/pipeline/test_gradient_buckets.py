"""Gradient buckets: their parameters, when they are posted, and their sums."""

import numpy as np
import pytest

from hpc3d.comm.communicator import Communicator, Pending, Self
from hpc3d.comm.mesh import Mesh
from hpc3d.comm.threads import run
from hpc3d.model.parameters import Parameters, no_matrix
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.tensor.layout import Layout
from hpc3d.training.optimizers.optimizer import is_matrix


class Diary(Communicator):
    """Communicator that records the elements of every post and wait; outputs equal inputs."""

    def __init__(self, axis, size, lines):
        super().__init__(0, size)
        self.axis, self.lines = axis, lines

    def note(self, block, result):
        self.lines.append(f"post {self.axis} {block.size}")

        def finish():
            self.lines.append(f"wait {self.axis} {block.size}")
            return result

        return Pending(finish)

    def _all_gather(self, block):
        return self.note(block, np.repeat(block, self.size, axis=0))

    def _reduce_scatter(self, block):
        return self.note(block, block[:1])

    def _all_reduce(self, block, op):
        return self.note(block, block)


def diary(add, size, zero=0, **how):
    """Return the buckets of the parameters from `add`, on two replicas, and the records."""
    lines = []
    comms = {axis: Diary(axis, 2, lines) for axis in "xd"}
    mesh = Mesh({"d": 2, "x": 2}, {"d": 0, "x": 0}, comms, Self())
    parameters = Parameters(mesh, "float64", zero)
    add(parameters)
    parameters.allocate(1)
    return Buckets(parameters, size, **how), lines


def three_layers(parameters):
    for number in range(3):
        for name in "ab":
            parameters.add(f"layers.{number}.{name}", (10,), Layout(""), partial=("d",))


def filling(buckets):
    return [" ".join(item.name[-3:] for item in bucket.items) for bucket in buckets]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, ["2.b", "2.a", "1.b", "1.a", "0.b", "0.a"]),
        (159, ["2.b", "2.a", "1.b", "1.a", "0.b", "0.a"]),
        (160, ["2.b 2.a", "1.b 1.a", "0.b 0.a"]),
        (300, ["2.b 2.a 1.b", "1.a 0.b 0.a"]),
        (480, ["2.b 2.a 1.b 1.a 0.b 0.a"]),
    ],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_bucket_holds_adjacent_parameters_up_to_its_size(size, expected, zero):
    """Parameters have 80 bytes each, in the order of their completion in the backward pass."""
    buckets, _ = diary(three_layers, size, zero)
    assert filling(buckets.sums) == expected
    forward = sorted(expected, key=lambda names: names[-3])  # by the first layer of a bucket
    assert filling(buckets.gathers) == (forward if zero else [])


def test_bucket_contains_only_parameters_with_the_same_reduction():
    def add(parameters):
        parameters.add("embedding.w", (10,), Layout(""), partial=("d",), completed_last=True)
        parameters.add("layers.0.w", (10,), Layout("d"))
        parameters.add("layers.1.x", (10,), Layout(""), partial=("x", "d"))
        parameters.add("layers.1.y", (10,), Layout(""), partial=("d",))

    buckets, _ = diary(add, 1e6)
    assert [(bucket.posted_last, bucket.axes) for bucket in buckets.sums] == [
        (False, ("d",)),
        (True, ("x", "d")),
        (True, ("d",)),
    ]


def test_bucket_is_posted_when_its_last_gradient_is_complete():
    buckets, lines = diary(three_layers, 300)
    buckets.finished("layers.2")
    assert not lines
    buckets.finished("layers.1")
    assert lines == ["post d 30"]
    buckets.finished("layers.0")
    assert lines == ["post d 30", "post d 30"]
    buckets.wait()
    assert lines[2:] == ["wait d 30", "wait d 30"]


def test_unit_finished_twice_is_posted_once():
    """This happens if a Reduce follows a backward pass that has posted its buckets."""
    buckets, lines = diary(three_layers, 160)
    for unit in ("layers.2", "layers.1", "layers.2", "layers.1"):
        buckets.finished(unit)
    assert lines == ["post d 20"] * 2


def test_unfinished_buckets_are_reduced_at_the_end():
    buckets, lines = diary(three_layers, 160)
    buckets.finished("layers.1")
    buckets.wait()
    assert lines == ["post d 20"] * 3 + ["wait d 20"] * 3


def test_table_completed_last_is_reduced_at_the_end_of_the_step():
    def add(parameters):
        parameters.add("embedding.token", (8,), Layout(""), partial=("d",), completed_last=True)
        parameters.add("embedding.position", (6,), Layout(""), partial=("d",))

    buckets, lines = diary(add, 1e6)
    buckets.finished("embedding")
    assert lines == ["post d 6"]
    buckets.wait()
    assert lines == ["post d 6", "post d 8", "wait d 6", "wait d 8"]


def test_data_axis_is_reduced_after_the_other_axes():
    def add(parameters):
        parameters.add("layers.0.b", (10,), Layout(""), partial=("d", "x"))

    buckets, lines = diary(add, 1e6, zero=1)
    buckets.finished("layers.0")
    assert lines == []  # nothing that a pass waits for stands behind a sum along x
    buckets.wait()
    assert lines == ["post x 10", "wait x 10", "post d 10", "wait d 10"]


@pytest.mark.parametrize(("size", "each"), [(160, 1), (0, 2)])
def test_reductions_of_at_most_two_layers_are_in_flight(size, each):
    """Their send buffers are copies of gradients. A layer has one bucket, or one per parameter."""

    def add(parameters):
        for number in range(4):
            for name in "ab":
                parameters.add(f"layers.{number}.{name}", (10,), Layout(""), partial=("d",))

    buckets, lines = diary(add, size)
    post, wait = [f"post d {20 // each}"] * each, [f"wait d {20 // each}"] * each
    for number in (3, 2, 1, 0):
        buckets.finished(f"layers.{number}")
    assert lines == [*post, *post, *wait, *post, *wait, *post]
    buckets.wait()
    assert lines[6 * each :] == [*wait, *wait]


def test_reductions_of_a_chunk_overlap_with_the_passes_of_other_chunks():
    """They wait for those of the previous chunk and, after the last pass, for each other."""

    def add(parameters):
        for number in range(8):
            parameters.add(f"layers.{number}.a", (10,), Layout(""), partial=("d",))
        parameters.add("layers.0.b", (10,), Layout(""), partial=("x", "d"))

    buckets, lines = diary(add, 80)
    post, wait = "post d 10", "wait d 10"
    buckets.all_finished([f"layers.{number}" for number in (5, 6, 7)])
    assert lines == [post] * 3
    buckets.all_finished([f"layers.{number}" for number in (2, 3, 4)])
    assert lines[3:] == [wait, post] * 3
    buckets.all_finished(["layers.0", "layers.1"])
    assert lines[9:] == [wait, wait, post, wait, post]
    buckets.wait()
    assert lines[14:] == ["post x 10", wait, wait, "wait x 10", post, wait]


def test_hybrid_sharding_reduces_shards_between_groups_during_the_backward_pass():
    """A bucket starts along r when the next one starts along d: 2 x 2 ranks, 10 elements each.

    The third bucket waits for the first one.
    """
    lines = []
    comms = {axis: Diary(axis, 2, lines) for axis in "rd"}
    parameters = Parameters(Mesh({"r": 2, "d": 2}, {}, comms, Self()), "float64", zero=1)
    for number in range(3):
        parameters.add(f"layers.{number}.a", (10,), Layout(""), partial=("r", "d"))
    parameters.allocate(1)
    buckets = Buckets(parameters, 80)
    for number in (2, 1):
        buckets.finished(f"layers.{number}")
    assert lines == ["post d 10", "wait d 10", "post r 5", "post d 10"]
    buckets.finished("layers.0")
    buckets.wait()
    assert lines[4:8] == ["wait r 5", "wait d 10", "post r 5", "post d 10"]
    assert lines[8:] == ["wait r 5", "wait d 10", "post r 5", "wait r 5"]


def test_each_step_starts_with_zero_gradients_and_no_posted_buckets():
    buckets, lines = diary(three_layers, 160)
    for _ in range(2):
        buckets.begin()
        assert not buckets.parameters.grad.any()
        buckets.parameters.grad += 1
        buckets.wait()
    assert lines == (["post d 20"] * 3 + ["wait d 20"] * 3) * 2


def test_gathers_are_posted_one_bucket_ahead():
    buckets, lines = diary(three_layers, 160, zero=1)
    buckets.gather()
    post, wait = "post d 10", "wait d 10"
    assert lines == [post, post, wait, post, wait, wait]


def growing_layers(parameters):
    """Layer n has 20 (n + 1) elements; the vectors of all layers are in one bucket."""
    for number in range(4):
        count = 20 * (number + 1)
        parameters.add(f"layers.{number}.w", (count,), Layout(""), partial=("d",), decay=True)
        parameters.add(f"layers.{number}.b", (2,), Layout(""), partial=("d",))


def test_later_gathers_are_posted_and_completed_in_the_order_of_the_forward_pass():
    """A bucket is completed before its first unit is used; two buckets are in flight."""
    buckets, lines = diary(growing_layers, 160, zero=1, gathers_later=True)
    buckets.gather()
    assert lines == []
    buckets.start_gathers()
    assert lines == ["post d 10", "post d 4"]
    added = {
        "layers.0": ["wait d 10", "post d 20", "wait d 4", "post d 30"],
        "layers.1": ["wait d 20", "post d 40"],
        "layers.2": ["wait d 30"],
        "layers.3": ["wait d 40"],
    }
    for unit, expected in added.items():
        for _ in range(2):  # microbatches
            before = len(lines)
            buckets.gathered(unit)
            assert lines[before:] == expected
            expected = []


def test_completed_values_are_gathered_once():
    buckets, lines = diary(three_layers, 160, zero=1, gathers_later=True)
    buckets.complete()  # the initial values are complete
    assert lines == []
    buckets.gather()
    for _ in range(2):
        buckets.complete()
        calls = [line.split()[0] for line in lines]
        assert calls == ["post", "post", "wait", "post", "wait", "wait"]


def test_stage_that_does_not_announce_its_units_is_reported():
    buckets, _ = diary(three_layers, 160, zero=1, gathers_later=True)
    buckets.start_gathers()
    buckets.gathered("layers.1")
    with pytest.raises(AssertionError, match=r"did not call starting\(unit\)"):
        buckets.wait()


SIZES = {"layers.0.a": 7, "layers.0.b": 4, "layers.1.a": 1, "head.b": 12}


@pytest.mark.parametrize("size", [0, 100, 1e6])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("data", [2, 3])
def test_reductions_and_gathers_of_real_replicas(data, zero, size):
    """Element g has the gradient g + 10 rank; all replicas see the update of each shard."""

    def rank(mesh):
        parameters = Parameters(mesh, "float64", zero)
        for name, count in SIZES.items():
            parameters.add(name, (count,), Layout(""), partial=("d",))
        parameters.allocate(1)
        buckets = Buckets(parameters, size)
        for item in parameters:
            item.grad[:] = np.arange(item.grad.size) + 10 * mesh.rank
        buckets.finished("layers.1")
        buckets.wait()
        for piece in parameters.pieces:
            parameters.value[piece.value] -= parameters.grad[piece.grad]
        buckets.gather()
        return {item.name: item.value.copy() for item in parameters}

    shift = 10 * sum(range(data))
    for values in run({"d": data}, rank):
        for name, count in SIZES.items():
            np.testing.assert_array_equal(values[name], -(data * np.arange(count) + shift))


@pytest.mark.parametrize("zero", [0, 1])
def test_tied_tables_receive_the_sum_of_both_gradients(zero):
    """The tables are on stages 0 and 2 of three, with two replicas each."""

    def rank(mesh):
        parameters, stage = Parameters(mesh, "float64", zero), mesh.coord("p")
        if stage != 1:
            how = {"tied_peer": 2 - stage, "completed_last": True, "partial": ("d",)}
            parameters.add("embedding.token", (3, 2), Layout("", ""), **how)
        parameters.allocate(1)
        buckets = Buckets(parameters, 1e6)
        for item in parameters:
            item.grad[...] = np.arange(6).reshape(3, 2) + 10**stage
        buckets.wait()
        buckets.sum_tied()
        return [parameters.grad[place.own_grad] for place in parameters.slices.values()]

    whole = 4 * np.arange(6) + 2 * (1 + 100)
    own = [slice(None)] * 2 if not zero else [slice(0, 3), slice(3, 6)]
    found = run({"p": 3, "d": 2}, rank)
    assert found[2:4] == [[], []]
    for stage in (0, 2):
        for replica in range(2):
            (gradient,) = found[2 * stage + replica]
            np.testing.assert_array_equal(gradient, whole[own[replica]])


@pytest.mark.parametrize("size", [0, 1e6])
@pytest.mark.parametrize(("zero", "whole"), [(0, no_matrix), (1, no_matrix), (1, is_matrix)])
@pytest.mark.parametrize("reduced", ["bfloat16", "float16"])
def test_16_bit_gradients_are_summed_in_float32(reduced, zero, whole, size):
    """Gradients of three replicas are rounded when posted, and once more when summed."""

    def add(parameters):
        parameters.add("layers.0.w", (6, 5), Layout("", ""), partial=("d",), std=0.1)
        parameters.add("layers.0.b", (12,), Layout(""), partial=("d",))

    def gradient(rank, count):
        return np.random.default_rng(rank).normal(size=count).astype(np.float32)

    def rank(mesh):
        parameters = Parameters(mesh, "float32", zero, whole, reduced)
        add(parameters)
        parameters.allocate(1)
        buckets, count = Buckets(parameters, size), parameters.grad.size
        parameters.grad[...] = gradient(mesh.rank, count)
        buckets.wait()
        parts = [gradient(each, count).astype(reduced).astype(np.float32) for each in range(3)]
        total = (parts[0] + parts[1] + parts[2]).astype(reduced).astype(np.float32)
        for item in parameters:
            own = parameters.slices[item].own_grad
            np.testing.assert_array_equal(parameters.grad[own], total[own])
        return parameters.grad.dtype

    assert run({"d": 3}, rank) == [np.dtype(np.float32)] * 3
