"""Counted bytes and calls, compared with closed forms and with the lower bound.

A single rank runs on a mesh whose communicators move no data but return blocks of the correct
shape. By symmetry, it represents all ranks. The events of its recorder are counted.
"""

from collections import Counter
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from hpc3d.comm.communicator import Communicator, Self, ready
from hpc3d.comm.mesh import Mesh
from hpc3d.comm.threads import run
from hpc3d.tensor.matmul import Matmul, sharded_matmul
from hpc3d.tensor.split import SCHEMES, Split
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.schema import EVENTS, OP, record_type


class Still(Communicator):
    """Communicator that moves no data, but returns blocks of the correct shape."""

    def _all_gather(self, block):
        return ready(np.zeros((self.size * block.shape[0], *block.shape[1:]), block.dtype))

    def _reduce_scatter(self, block):
        return ready(block[: block.shape[0] // self.size])

    def _all_reduce(self, block, op):
        return ready(block)

    def _broadcast(self, block, root):
        return ready(block)

    def _reduce(self, block, root):
        return ready(block if self.rank == root else block[:0])


def still_mesh(sizes, coords=None):
    coords = coords or dict.fromkeys(sizes, 0)
    comms = {axis: Still(coords[axis], size) for axis, size in sizes.items() if size > 1}
    recorder = Recorder("unused", {"rank": 0})
    return Mesh(sizes, coords, comms, Self()).traced(recorder), recorder


def counted(recorder):
    """Return the total number of received elements, and the number of calls of every op."""
    events = np.frombuffer(recorder.table, record_type(EVENTS), recorder.count)
    events = events[events["seq"] >= 0]
    calls = Counter(OP[op] for op in events["op"])
    return int(events["bytes"].sum()) // 4, dict(calls)


def linear(split, sizes, shape, keep="xw", backward=True, coords=None):
    """Return the words and calls of a linear layer [M, K, N] on one rank of a mesh."""
    m, k, n = shape
    mesh, recorder = still_mesh(sizes, coords)
    matmul = sharded_matmul(mesh, split, keep)
    x = np.zeros(split.x.block((m, k), mesh), np.float32)
    w = np.zeros(split.w.block((k, n), mesh), np.float32)
    _, saved = matmul.forward_saving(x, w)
    if backward:
        matmul.backward_saved(saved, np.zeros(split.y.block((m, n), mesh), np.float32))
    return counted(recorder)


def cuboid_words(shape, grid):
    """Return [MK (p_n - 1) + KN (p_m - 1) + MN (p_k - 1)] / P, for one pass (facts 1.10)."""
    (m, k, n), (pm, pk, pn) = shape, grid
    return (m * k * (pn - 1) + k * n * (pm - 1) + m * n * (pk - 1)) / (pm * pk * pn)


def lower_bound(shape, ranks):
    """Lower bound of Al Daas et al., SPAA'22, arXiv:2205.13407, theorem 3."""
    m, n, k = sorted(shape, reverse=True)
    if ranks <= m / n:
        words = (m * n + m * k) / ranks + n * k
    elif ranks <= m * n / k**2:
        words = 2 * sqrt(m * n * k * k / ranks) + m * n / ranks
    else:
        words = 3 * (m * n * k / ranks) ** (2 / 3)
    return words - (m * n + m * k + n * k) / ranks


GRIDS = [(2, 2, 2), (1, 2, 4), (2, 2, 3), (4, 1, 2), (4, 4, 4), (2, 4, 8)]  # p_m, p_k, p_n
SHAPE = (384, 192, 576)  # M, K, N


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_3d_communication_volume_matches_the_cuboid_formula(grid):
    pm, pk, pn = grid
    sizes = {"x": pm, "y": pn, "z": pk}
    once = cuboid_words(SHAPE, grid)
    assert linear(SCHEMES["3d"], sizes, SHAPE, backward=False)[0] == once
    assert linear(SCHEMES["3d"], sizes, SHAPE)[0] == 2 * once
    m, k, n = SHAPE
    again = (m * k * (pn - 1) + k * n * (pm - 1)) / (pm * pk * pn)
    assert linear(SCHEMES["3d"], sizes, SHAPE, keep="")[0] == 2 * once + again


def test_3d_makes_six_calls_or_eight_without_saved_operands():
    cube = {"x": 2, "y": 2, "z": 2}
    assert linear(SCHEMES["3d"], cube, SHAPE)[1] == {"all_gather": 3, "reduce_scatter": 3}
    lean = linear(SCHEMES["3d"], cube, SHAPE, keep="")[1]
    assert lean == {"all_gather": 5, "reduce_scatter": 3}


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_1d_all_reduces_the_activations(ranks):
    m, k, n = SHAPE
    part = (ranks - 1) / ranks
    column, row = SCHEMES["1d"], SCHEMES["1d"].next()
    assert linear(column, {"x": ranks}, SHAPE, backward=False) == (0, {})
    assert linear(column, {"x": ranks}, SHAPE) == (2 * part * m * k, {"all_reduce": 1})
    assert linear(row, {"x": ranks}, SHAPE) == (2 * part * m * n, {"all_reduce": 1})


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_1d_with_sequence_parallelism_gathers_and_reduce_scatters(ranks):
    m, k, n = SHAPE
    part = (ranks - 1) / ranks
    column, row = SCHEMES["1d-sequence"], SCHEMES["1d-sequence"].next()
    calls = {"all_gather": 1, "reduce_scatter": 1}
    assert linear(column, {"x": ranks}, SHAPE) == (2 * part * m * k, calls)
    assert linear(row, {"x": ranks}, SHAPE) == (2 * part * m * n, calls)
    assert linear(column, {"x": ranks}, SHAPE, keep="")[0] == 3 * part * m * k


@pytest.mark.parametrize("q", [2, 3, 4])
def test_summa_communication_volume_and_calls(q):
    """3 (MK + KN) (q - 1) / q^2 in 6 q calls; calls along axes of size 1 are not made."""
    m, k, n = SHAPE
    sizes = {"x": q, "y": q}
    each = [
        linear(SCHEMES["2d-summa"], sizes, SHAPE, coords={"x": i, "y": j})
        for i in range(q)
        for j in range(q)
    ]
    assert {words for words, _ in each} == {3 * (m * k + k * n) * (q - 1) / q**2}
    assert all(calls == {"broadcast": 4 * q, "reduce": 2 * q} for _, calls in each)


@pytest.mark.parametrize("split", ["z x", "x z"])
@pytest.mark.parametrize("deep", ["z", "x"])
@pytest.mark.parametrize(("q", "depth"), [(2, 2), (4, 2), (2, 3)])
def test_25d_reduces_weight_gradients_over_its_depth(q, depth, deep, split):
    """This holds if the blocks are small, for any names and order of the axes."""
    m, k, n = SHAPE
    sizes = {"x": q, "y": q, "z": q} | {deep: depth}
    gathers = m * k * (q - 1) / (q * q * depth) + k * n * (q - 1) / q**2
    over_depth = 2 * (depth - 1) / depth * k * n / q**2
    assert SCHEMES["2.5d"] == Split(m="z x", n="y", replicate="z")
    found, _ = linear(Split(m=split, n="y", replicate=deep), sizes, SHAPE)
    assert found == 2 * gathers + over_depth


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_fsdp_gathers_weights_twice(ranks):
    _, k, n = SHAPE
    words, calls = linear(Split(m="x"), {"x": ranks}, SHAPE, keep="")
    assert words == 3 * (ranks - 1) / ranks * k * n
    assert calls == {"all_gather": 2, "reduce_scatter": 1}


@pytest.mark.parametrize("q", [2, 3])
def test_broadcast_scheme_moves_full_blocks_to_all_but_one(q):
    """For each of 8 blocks (X, W, Y; dY, X and W again, dX, dW), q - 1 copies per group."""
    m, k, n = SHAPE
    split = SCHEMES["3d-broadcast"]

    def rank(mesh):
        recorder = Recorder("unused", {"rank": mesh.rank})
        matmul = sharded_matmul(mesh.traced(recorder), split, keep="")
        x = np.zeros(split.x.block((m, k), mesh), np.float32)
        w = np.zeros(split.w.block((k, n), mesh), np.float32)
        dy = np.zeros(split.y.block((m, n), mesh), np.float32)
        matmul.backward_saved(matmul.forward_saving(x, w)[1], dy)
        return counted(recorder)

    results = run({"x": q, "y": q, "z": q}, rank)
    moved = 3 * m * k + 3 * k * n + 2 * m * n
    assert sum(words for words, _ in results) == moved * (q - 1)
    assert all(calls == {"broadcast": 5, "reduce": 3} for _, calls in results)


GOLDEN = [
    ((4096, 4096, 4096), (4, 4, 4)),
    # 16 : 1 : 4, in the three cases of the theorem
    ((9216, 576, 2304), (32, 2, 8)),
    ((9216, 576, 2304), (12, 1, 3)),
    ((9216, 576, 2304), (3, 1, 1)),
    ((32768, 8192, 8192), (16, 4, 4)),
    ((16384, 4096, 8192), (8, 2, 4)),
]


@pytest.mark.parametrize(("shape", "grid"), GOLDEN, ids=str)
def test_best_cuboid_attains_the_lower_bound(shape, grid, monkeypatch):
    """Only shapes are used; the local product is omitted."""
    monkeypatch.setattr(Matmul, "multiply", still_multiply)
    pm, pk, pn = grid
    sizes = {"x": pm, "y": pn, "z": pk}
    words, _ = linear(SCHEMES["3d"], sizes, shape, backward=False)
    assert words == pytest.approx(lower_bound(shape, pm * pk * pn), rel=1e-12)


def still_multiply(self, a, b, foreign):
    return np.zeros((a.shape[0], b.shape[1]), a.dtype)


def test_deferred_axis_moves_nothing():
    split = replace(Split(m="x", replicate="x"), defer="x")
    assert linear(split, {"x": 4}, SHAPE) == (0, {})


def test_gather_is_posted_without_waiting_for_axes_of_one_rank():
    """This allows another gather to be in flight at the same time."""
    mesh, recorder = still_mesh({"d": 2, "x": 1, "y": 1, "z": 1})
    matmul = sharded_matmul(mesh, SCHEMES["3d"].over("d", 3))
    pending = matmul.gather(np.zeros((4, 4)), matmul.w_layout, matmul.axes["m"])
    assert recorder.count == 0
    assert pending.wait().shape == (8, 4) and recorder.count > 0
