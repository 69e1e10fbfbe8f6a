"""Predicted bytes and messages, compared with those counted in a step."""

from collections import Counter
from copy import copy

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.comm.mesh import NullRecorder
from hpc3d.partition.execution.predicted_traffic import (
    BorderTraffic,
    SumTraffic,
    TensorTraffic,
    border_traffic,
    sum_traffic,
    tensor_traffic,
    traffic_lines,
)
from hpc3d.partition.execution.staged_model import staged_model
from tests.partition.execution.modules import HERE, STEPS, even_parts, prepared, trained
from tests.partition.tensor_parallel.modules import HERE as TENSOR

EVERYTHING, CHAIN = f"{HERE}:everything", f"{HERE}:chain"


class Counting(NullRecorder):
    """Wrap communicators, and count what the ranks send and reduce in their steps."""

    def __init__(self, counts):
        self.counts = counts

    def wrap(self, comm, axis):
        send, total, gather = comm.send, comm.all_reduce, comm.all_gather

        def counted_send(block, peer):
            self.counts[axis, self.phase, "bytes"] += block.nbytes
            self.counts[axis, self.phase, "messages"] += 1
            return send(block, peer)

        def counted_sum(block, op="sum"):
            self.counts[axis, comm.members] += block.nbytes * (self.step >= 0)
            return total(block, op)

        def counted_gather(block, dim=0):
            self.counts[axis, "gathered"] += block.nbytes * comm.size * (self.step >= 0)
            return gather(block, dim)

        comm = copy(comm)
        comm.send, comm.all_reduce, comm.all_gather = counted_send, counted_sum, counted_gather
        return comm


def counted(name, replicas, micros, dtype):
    """Return {(axis, kind): number} of all ranks in STEPS steps."""
    counts = Counter()
    how = {"watched": lambda mesh: mesh.traced(Counting(counts)), "dtype": dtype}
    trained(name, replicas, micros, "1f1b", **how)
    return counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "replicas", "micros"),
    [
        (CHAIN, (1, 1), 4),
        (CHAIN, (2, 2, 2), 3),
        (CHAIN, (3, 2), 2),
        (EVERYTHING, (1, 1, 1), 2),
        (EVERYTHING, (1, 2, 3), 2),
    ],
)
def test_predicted_traffic_matches_the_counted_one(name, replicas, micros, dtype):
    """In 16 bits, messages have 2 bytes per element, and gradients 4."""
    _, _, captured = prepared(name, dtype)
    model = staged_model(captured, even_parts(captured, len(replicas)), replicas, [False] * 3)
    found = counted(name, replicas, micros, dtype)
    borders = [*border_traffic(model, captured.batch, micros)]
    assert len(borders) == len(replicas) - 1
    for phase, numbers in (("forward", "forward"), ("backward", "backward")):
        nbytes = sum(getattr(border, numbers) for border in borders)
        assert found["p", phase, "bytes"] == STEPS * nbytes > 0
    messages = sum(found["p", phase, "messages"] for phase in ("forward", "backward"))
    assert messages == STEPS * sum(border.messages for border in borders)
    buffers = (
        max(4, dtype.itemsize) * 2 * 6 if name == EVERYTHING else 0
    )  # averages of means and variances
    for ranks, nbytes in sum_traffic(model):
        extra = found["d", ranks] - STEPS * len(ranks) * nbytes
        assert extra in (0, STEPS * len(ranks) * buffers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "recompute"),
    [("transformer", (1,), False), ("transformer", (1, 2), True), ("llama(1)", (1, 1), False)],
)
def test_predicted_traffic_of_tensor_parallel_ranks_matches_the_counted_one(
    name, replicas, recompute
):
    """This holds for both ranks of a replica; each sends as much as a stage without them."""
    name, counts = f"{TENSOR}:{name}", Counter()
    how = {"watched": lambda mesh: mesh.traced(Counting(counts)), "ways": 2}
    trained(name, replicas, 2, "1f1b" if replicas[1:] else "none", recompute, **how)
    _, _, captured = prepared(name)
    parts, again = even_parts(captured, len(replicas)), [recompute] * len(replicas)
    model = staged_model(captured, parts, replicas, again, ways=2)
    reduced = sum(number for (axis, *_), number in counts.items() if axis == "x")
    reduced -= counts["x", "gathered"]
    found = Counter()
    for _, op, _, nbytes in tensor_traffic(model, captured.batch, 2):
        found[op] += 2 * STEPS * nbytes
    assert (found["all_reduce"], found["all_gather"]) == (reduced, counts["x", "gathered"])
    assert reduced > 0 and counts["x", "gathered"] > 0
    sent = sum(number for key, number in counts.items() if key[::2] == ("p", "bytes"))
    borders = border_traffic(model, captured.batch, 2)
    assert sent == STEPS * sum(border.forward + border.backward for border in borders)
    for ranks, nbytes in sum_traffic(model):
        assert counts["d", ranks] == STEPS * len(ranks) * nbytes


def test_traffic_lines_list_borders_and_gradient_reductions():
    borders = [BorderTraffic(2_000_000, 1_000_000, 6)]
    sums = [SumTraffic((0, 1, 2), 3_000_000), SumTraffic((0, 3), 8)]
    tensor = [TensorTraffic(1, "all_reduce", 4, 5_000_000)]
    assert [*traffic_lines(borders, sums, tensor)] == [
        "boundary 1: 2 MB forward and 1 MB backward in 6 messages per step",
        "ranks 0 to 2: all-reduce of 3 MB of gradients",
        "ranks 0 3: all-reduce of 8e-06 MB of gradients",
        "stage 1: 5 MB in 4 all-reduces of tensor-parallel ranks per step",
    ]
