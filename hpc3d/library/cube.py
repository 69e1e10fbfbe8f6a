"""A cube of ranks for a notebook: threads of this process that multiply together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.comm.threads import run
from hpc3d.predict.simulation.count import CAPACITY, InMemory, Prediction
from hpc3d.tensor.matmul import Matmul
from hpc3d.tensor.split import SCHEMES, Split
from hpc3d.trace.schema import EVENTS, record_type

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.tensor.layout import Layout


class Received(NamedTuple):
    """What a rank received in calls of one kind, in bytes, the mean over ranks."""

    axis: str
    operation: str
    calls: float
    received: float


class Cube:
    """Ranks along the axes x, y and z, one thread each.

    Matrices are given and returned whole; each rank gets its block, and `calls` has what the last
    product moved (arXiv:2105.14450, section 3; docs/theory.md has the formulas).

        cube = Cube(x=2, y=2, z=2)
        y = cube.matmul(x, w)                    # x @ w, by the 3-D algorithm
        cube.calls                               # [Received("x", "all_gather", ...), ...]
    """

    def __init__(self, x: int = 1, y: int = 1, z: int = 1) -> None:
        self.sizes = {"x": x, "y": y, "z": z}
        if wrong := {axis: size for axis, size in self.sizes.items() if size < 1}:
            raise ValueError(f"Cube: {wrong}: an axis has 1 rank or more")
        self.calls: list[Received] = []

    @property
    def ranks(self) -> int:
        return int(np.prod([*self.sizes.values()]))

    def layouts(self, scheme: str | Split = "3d") -> dict[str, Layout]:
        """How a scheme stores each matrix: {"x": ..., "w": ..., "y": ...}."""
        split = _split(scheme)
        return {"x": split.x, "w": split.w, "y": split.y}

    def matmul(self, x: np.ndarray, w: np.ndarray, scheme: str | Split = "3d") -> np.ndarray:
        """The product of x [m, k] and w [k, n], float32 or float64; ValueError where the blocks
        of a scheme (a name of `SCHEMES`, or a `Split`) are not whole."""
        return self._run(scheme, x, w)[0]

    def gradients(
        self, x: np.ndarray, w: np.ndarray, dy: np.ndarray, scheme: str | Split = "3d"
    ) -> tuple[np.ndarray, np.ndarray]:
        """dx = dy w^T and dw = x^T dy, of the same shapes as x and w."""
        return self._run(scheme, x, w, dy)

    def _run(self, scheme, x, w, dy=None):
        split = _split(scheme)
        x, w = np.asarray(x), np.asarray(w)
        _check(split, x, w, dy, self.sizes)
        results = run(self.sizes, lambda mesh: _product(mesh, split, x, w, dy))
        self.calls = _calls([prediction for *_, prediction in results])
        shapes = {"x": x.shape, "w": w.shape, "y": (len(x), w.shape[1])}
        names = ["y"] if dy is None else ["x", "w"]
        wholes = [np.empty(shapes[name], x.dtype) for name in names]
        for mesh, blocks, _ in results:
            for name, whole, block in zip(names, wholes, blocks, strict=True):
                where = getattr(split, name).slices(whole.shape, mesh)
                if block.size:
                    whole[where] = block
        return wholes


def _split(scheme: str | Split) -> Split:
    """The Split of a scheme."""
    if not isinstance(scheme, str):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"{scheme}: no such scheme; there are {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def _check(split, x, w, dy, sizes):
    """ValueError where matrices do not fit together, or have no whole blocks."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"x {x.shape} and w {w.shape}: there is no product of these")
    if x.dtype != w.dtype or x.dtype not in (np.float32, np.float64):
        raise ValueError(f"x is {x.dtype} and w {w.dtype}: give both as float32 or as float64")
    shapes = {"x": x.shape, "w": w.shape, "y": (len(x), w.shape[1])}
    if dy is not None and np.shape(dy) != shapes["y"]:
        raise ValueError(f"dy {np.shape(dy)}: must be {shapes['y']}, as x @ w")
    for name, shape in shapes.items():
        for dim, (size, axes) in enumerate(zip(shape, getattr(split, name), strict=True)):
            parts = int(np.prod([sizes.get(axis, 1) for axis in axes]))
            if size % parts:
                raise ValueError(f"{name} {shape}: dim {dim} has no {parts} equal parts")


def _product(mesh: Mesh, split: Split, x, w, dy):
    """A rank's blocks of the result, and what it received."""
    recorder = InMemory(None, {"rank": mesh.rank}, CAPACITY, clock=lambda: 0)
    product = Matmul(mesh.traced(recorder), split)
    block = {
        name: np.ascontiguousarray(whole[getattr(split, name).slices(whole.shape, mesh)])
        for name, whole in (("x", x), ("w", w), ("y", dy))
        if whole is not None
    }
    if dy is None:
        blocks = (product.forward(block["x"], block["w"]),)
    else:
        blocks = product.backward(block["x"], block["w"], block["y"])
    events = np.frombuffer(recorder.table, record_type(EVENTS), recorder.count)
    axes = [group["axis"] for group in recorder.header["groups"]]
    return mesh, blocks, Prediction(events, axes, {})


def _calls(predictions: list[Prediction]) -> list[Received]:
    """The means over ranks, by axis and operation."""
    calls, received = Counter(), Counter()
    for prediction in predictions:
        for (axis, operation, _), (count, amount) in prediction.moved().items():
            calls[axis, operation] += count
            received[axis, operation] += amount
    ranks = len(predictions)
    return [Received(*key, count / ranks, received[key] / ranks) for key, count in calls.items()]
