"""Predicted communication volume and message count of a partitioned model in each step.

boundaries    Values are sent forward and gradients backward. The volume is their total size for
              all samples. Each value or gradient of a microbatch is sent in one message between
              each pair of ranks of the two stages that have samples in common.
all-reduces   Each of n replicas receives 2 (n - 1) / n times the size of its gradients. The
              gradient of a weight on several stages is reduced over all ranks of these stages.
tensor axis   The tensor-parallel ranks of a replica call collectives in each pass of a microbatch.
              The size of a call is that of the full value; recomputation repeats the calls of the
              forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch

from hpc3d.comm.stage_mesh import ranks_of, shares
from hpc3d.console.sanitize import counted
from hpc3d.partition.capture import gradient_bytes, is_trained, shape_of, state_of
from hpc3d.partition.execution.staged_model import StagedModel
from hpc3d.partition.tensor_parallel.local_graph import collectives_of


class BorderTraffic(NamedTuple):
    """Bytes and messages sent per step across a chunk boundary, summed over all ranks."""

    forward: int
    backward: int
    messages: int


class SumTraffic(NamedTuple):
    """Size in bytes of the gradients that a group of ranks all-reduces in each step."""

    ranks: tuple[int, ...]
    nbytes: int


class TensorTraffic(NamedTuple):
    """Calls of the collective `op` per step on a stage, and their total size in bytes.

    The calls of all replicas are counted, but only once for the ranks of a replica.
    """

    stage: int
    op: str
    calls: int
    nbytes: int


def border_traffic(model: StagedModel, batch: int, microbatches: int) -> Iterator[BorderTraffic]:
    """Yield the traffic across each boundary between chunks on different stages."""
    width = len(model.replicas)
    for number, program in enumerate(model.programs[:-1]):
        if width == 1:
            continue
        senders, receivers = (model.replicas[part % width] for part in (number, number + 1))
        pairs = _pairs(senders, receivers, batch // microbatches)
        values = [node.meta["val"] for node in program.sent]
        sizes = [prod(shape_of(each, batch)) * each.dtype.itemsize for each in values]
        graded = [node in model.graded for node in program.sent]
        back = sum(size for size, has_gradient in zip(sizes, graded) if has_gradient)
        count = (len(sizes) + sum(graded)) * pairs * microbatches
        yield BorderTraffic(*(model.ways * number for number in (sum(sizes), back, count)))


def _pairs(one, other, rows):
    """Return the number of (sender, receiver) pairs of ranks that have samples in common."""
    if one == other:
        return one
    return sum(
        max(a.start, b.start) < min(a.stop, b.stop)
        for a in shares(rows, one)
        for b in shares(rows, other)
    )


def sum_traffic(model: StagedModel) -> Iterator[SumTraffic]:
    """Return the ranks and the size in bytes of each gradient all-reduce in a step.

    Gradients are reduced over the replicas of a stage or, for tied weights, over all ranks that
    hold the weight.
    """
    like, ways = state_of(model.captured), model.ways
    found: Counter[tuple[int, ...]] = Counter()
    for name, stages in model.owners.items():
        nbytes = gradient_bytes(like[name])
        for plane in range(ways) if is_trained(like[name]) else ():
            ranks = ranks_of(model.replicas, ways, plane)
            group = tuple(rank for stage in stages for rank in ranks[stage])
            found[group] += nbytes // ways if name in model.splits else nbytes
    return (SumTraffic(*each) for each in sorted(found.items()) if len(each[0]) > 1)


def tensor_traffic(model: StagedModel, batch: int, microbatches: int) -> list[TensorTraffic]:
    """Return the collectives of the tensor-parallel ranks in each step."""
    width, found = len(model.replicas), Counter[tuple[int, str]]()
    calls: Counter[tuple[int, str]] = Counter()
    for number, program in enumerate(model.programs):
        stage, times = number % width, {"forward": 1 + model.recompute[number], "backward": 1}
        passes = microbatches * model.replicas[stage]
        for node in program.module.graph.nodes:
            for phase, op in collectives_of(node):
                value = node.meta["val"]
                split = any(isinstance(size, torch.SymInt) for size in value.shape)
                nbytes = prod(shape_of(value, batch)) * value.element_size()
                found[stage, op] += times[phase] * nbytes * (1 if split else passes)
                calls[stage, op] += times[phase] * passes
    return [TensorTraffic(*key, calls[key], found[key]) for key in sorted(calls)]


def traffic_lines(
    borders: Iterable[BorderTraffic],
    sums: Iterable[SumTraffic],
    tensor: Iterable[TensorTraffic] = (),
) -> Iterator[str]:
    """Yield the log lines that report the predicted traffic."""
    for number, border in enumerate(borders, 1):
        yield (
            f"boundary {number}: {border.forward / 1e6:.6g} MB forward and "
            f"{border.backward / 1e6:.6g} MB backward in {border.messages} messages per step"
        )
    for each in sums:
        yield f"ranks {_range(each.ranks)}: all-reduce of {each.nbytes / 1e6:.6g} MB of gradients"
    for stage, op, calls, nbytes in tensor:
        name = counted(calls, op.replace("_", "-"))
        yield (f"stage {stage}: {nbytes / 1e6:.6g} MB in {name} of tensor-parallel ranks per step")


def _range(ranks):
    contiguous = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if contiguous else " ".join(map(str, ranks))
