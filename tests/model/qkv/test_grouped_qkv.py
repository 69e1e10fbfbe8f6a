"""The product qkv with separate weights for q, k and v: FLOPs and memory of a rank."""

import numpy as np
import pytest

from hpc3d.comm.threads import Threads, run
from hpc3d.model.parameters import Parameters
from hpc3d.model.qkv.grouped_qkv import GroupedQkv
from hpc3d.model.spec import ModelSizes
from hpc3d.tensor.matmul import sharded_matmul
from hpc3d.tensor.split import SCHEMES

HEADS, WIDTH, ROWS = 12, 2, 8
HIDDEN = HEADS * WIDTH


def layer(mesh, scheme, kv_heads, keep="xw"):
    sizes = ModelSizes(1, HIDDEN, HEADS, 4, 10, kv_heads=kv_heads)
    parameters = Parameters(mesh, "float64")
    matmul = sharded_matmul(mesh, SCHEMES[scheme], keep)
    made = GroupedQkv(parameters, "layers.0", sizes, matmul, 0.2, True)
    parameters.allocate(3)
    for item in parameters:
        if item.name.endswith("bias"):
            columns = item.layout.slices(item.shape, mesh)[0]
            item.value[...] = np.arange(columns.start, columns.stop)
    return made, parameters


def whole(kv_heads):
    """Return {name: value} on one rank."""
    items = run({}, lambda mesh: [*layer(mesh, "3d", kv_heads)[1]])[0]
    return {item.name: item.value for item in items}


CASES = [
    *(({"x": 2}, "1d", 1), ({"x": 4}, "1d", 2), ({"x": 4}, "1d-sequence", 1)),
    *(({"x": 2, "y": 4}, "2d", 2), ({"x": 2, "y": 2, "z": 2}, "3d", 1), ({"y": 2}, "3d", 4)),
]


@pytest.mark.parametrize(("axes", "scheme", "kv_heads"), CASES)
def test_rank_computes_its_queries_and_their_shared_keys(axes, scheme, kv_heads):
    """A rank has the columns of its queries, and the key heads that these queries share."""
    x, values = np.random.default_rng(1).normal(size=(ROWS, HIDDEN)), whole(kv_heads)

    def columns(mesh):
        made, _ = layer(mesh, scheme, kv_heads)
        split = SCHEMES[scheme]
        y, _ = made.forward(x[split.x.slices(x.shape, mesh)].copy())
        rows = split.y.slices((ROWS, HIDDEN), mesh)[0]
        return mesh.index(split.y[1]), mesh.count(split.y[1]), rows, y

    for place, members, rows, y in run(axes, columns):
        queries = range(place * HEADS // members, (place + 1) * HEADS // members)
        keys = sorted({query * kv_heads // HEADS for query in queries})
        expected = [
            column
            for letter, heads in (("q", queries), ("k", keys), ("v", keys))
            for column in by_head(values, f"layers.0.{letter}", x[rows], heads)
        ]
        np.testing.assert_allclose(y, np.concatenate(expected, 1), atol=1e-12)


def by_head(values, name, x, heads):
    """Return the product and the bias for each of some heads."""
    places = (slice(head * WIDTH, (head + 1) * WIDTH) for head in heads)
    return [x @ values[f"{name}.weight"][:, at] + values[f"{name}.bias"][at] for at in places]


@pytest.mark.parametrize("keep", ["", "x", "xw"])
@pytest.mark.parametrize(("axes", "gathered"), [({"x": 2}, True), ({"y": 2}, False)])
def test_only_gathered_weights_are_saved_for_backward(axes, gathered, keep):
    """A copy of the weights per microbatch in flight would be large, so they are joined again."""

    def kept(mesh):
        made, parameters = layer(mesh, "3d", 1, keep)
        dims = SCHEMES["3d"].x.block((ROWS, HIDDEN), mesh)
        y, saved = made.forward(np.ones(dims))
        made.backward(y, saved)
        return saved.w is not None, [np.abs(item.grad).max() for item in parameters]

    for keeps, gradients in run(axes, kept):
        assert keeps == (gathered and "w" in keep) and min(gradients) > 0


def test_weight_owner_saves_the_broadcast_copy(monkeypatch):
    """Its own block is returned by an MPI broadcast. In the backward pass, it must not broadcast
    more than the other ranks wait for."""

    def broadcast(comm, block, root):
        whole = comm.share(block)[root].copy()
        return comm.leave(block if comm.rank == root else whole)

    monkeypatch.setattr(Threads, "_broadcast", broadcast)

    def keeps(mesh):
        made, _ = layer(mesh, "3d-broadcast", 1)
        _, saved = made.forward(np.ones(SCHEMES["3d-broadcast"].x.block((ROWS, HIDDEN), mesh)))
        return saved.w is not None

    assert all(run({"x": 2, "y": 2, "z": 2}, keeps))


def test_replicated_key_heads_have_partial_gradients():
    """Gradients are 0 for heads that its queries do not use."""
    x, dy = np.random.default_rng(1).normal(size=(2, ROWS, HIDDEN))

    def gradients(mesh):
        made, parameters = layer(mesh, "3d", 2)
        block = x[SCHEMES["3d"].x.slices(x.shape, mesh)].copy()
        y, saved = made.forward(block)
        made.backward(dy[:, : y.shape[1]].copy(), saved)
        return {item.name: item for item in parameters}

    for rank, items in enumerate(run({"y": 4}, gradients)):
        item = items["layers.0.k.weight"]
        assert item.partial == ("y",) and item.grad.shape == (HIDDEN, 2 * WIDTH)
        other = slice(0, WIDTH) if rank > 1 else slice(WIDTH, 2 * WIDTH)
        assert not item.grad[:, other].any() and item.grad.any(0).sum() == WIDTH
        assert items["layers.0.q.weight"].partial == ()
