"""Sharded matrix products for notebooks, computed by one thread per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hpc3d.arrays.array import Array
from hpc3d.comm.mesh import Mesh
from hpc3d.comm.threads import meshes, run
from hpc3d.console.sanitize import counted
from hpc3d.predict.simulation.count import moved_by
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import sharded_matmul
from hpc3d.tensor.split import SCHEMES, Split

_MOST = 512  # maximum number of threads


class Received(NamedTuple):
    """Communication by one type of collective along one mesh axis, averaged over the ranks.

    Attributes
    ----------
    axis : str
        Mesh axis.
    operation : str
        Collective, such as "all_gather".
    calls : float
        Number of calls per rank.
    received : float
        Received bytes per rank.
    """

    axis: str
    operation: str
    calls: float
    received: float


class _Done(NamedTuple):
    """Mesh, computed blocks and communication of one rank.

    `moved` maps (axis, operation) to (calls, received bytes).
    """

    mesh: Mesh
    blocks: tuple[Array, ...]
    moved: dict[tuple[str, str], tuple[int, int]]


class Cube:
    """Mesh of ranks with the axes x, y and z, in which each rank is a thread.

    Arguments and results are full matrices; each rank works on its block.

    Parameters
    ----------
    x, y, z
        Number of ranks along each axis.

    Attributes
    ----------
    calls : list of Received
        Communication during the last matrix product (arXiv:2105.14450, section 3; formulas in
        docs/theory.md).

    Raises
    ------
    ValueError
        If a size is less than 1, or the cube has more than 512 ranks.

    Examples
    --------
    >>> cube = Cube(x=2, y=2, z=2)
    >>> y = cube.matmul(np.ones((4, 8)), np.ones((8, 4)))
    >>> cube.calls[0]
    Received(axis='y', operation='all_gather', calls=1.0, received=32.0)
    """

    def __init__(self, x: int = 1, y: int = 1, z: int = 1) -> None:
        self.sizes = {"x": x, "y": y, "z": z}
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"Cube: {axis} = {size!r}: must be a positive integer")
        if self.ranks > _MOST:
            raise ValueError(f"Cube: {self.ranks} ranks exceed the limit of {_MOST} threads")
        self.calls: list[Received] = []

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"Cube({sizes}): {counted(self.ranks, 'rank')} on threads"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def shard(self, whole: np.ndarray, layout: Layout) -> list[np.ndarray]:
        """Split a matrix into the blocks of all ranks.

        Parameters
        ----------
        whole
            Full matrix.
        layout
            Layout of the matrix, such as `layouts()["w"]`.

        Returns
        -------
        list of ndarray
            One block per rank, in rank order: z varies fastest.

        Raises
        ------
        ValueError
            If a dimension cannot be split evenly.
        """
        return [
            np.ascontiguousarray(whole[layout.slices(whole.shape, mesh)])
            for mesh in meshes(self.sizes)[0]
        ]

    def layouts(self, scheme: str | Split = "3d") -> dict[str, Layout]:
        """Return the layouts of the matrices in Y = X W under a sharding scheme.

        Parameters
        ----------
        scheme
            Name in `hpc3d.SCHEMES`, or a `Split`.

        Returns
        -------
        dict
            Layout of each matrix, with the keys "x", "w" and "y".
        """
        split = _split(scheme)
        return {"x": split.x, "w": split.w, "y": split.y}

    def matmul(self, x: np.ndarray, w: np.ndarray, scheme: str | Split = "3d") -> np.ndarray:
        """Return the product of two matrices.

        Parameters
        ----------
        x
            Matrix [m, k], float32 or float64.
        w
            Matrix [k, n] of the same type.
        scheme
            Name of a sharding scheme in `hpc3d.SCHEMES`, or a `Split`.

        Returns
        -------
        ndarray
            Matrix [m, n].

        Raises
        ------
        ValueError
            If a dimension is not divisible by the number of its blocks, or the scheme shards no
            matrix along an axis with more than one rank.
        """
        return self._run(scheme, x, w)[0]

    def gradients(
        self, x: np.ndarray, w: np.ndarray, dy: np.ndarray, scheme: str | Split = "3d"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients with respect to both factors of a matrix product.

        Parameters
        ----------
        x, w
            Factors of the product, [m, k] and [k, n].
        dy
            Gradient with respect to the product, [m, n].
        scheme
            Name of a sharding scheme in `hpc3d.SCHEMES`, or a `Split`.

        Returns
        -------
        dx : ndarray
            dy w^T, [m, k].
        dw : ndarray
            x^T dy, [k, n].

        Raises
        ------
        ValueError
            If a dimension is not divisible by the number of its blocks, or the scheme shards no
            matrix along an axis with more than one rank.
        """
        return self._run(scheme, x, w, dy)

    def _run(self, scheme, x, w, dy=None):
        split = _split(scheme)
        _refuse_idle(split, self.sizes)
        x, w = np.asarray(x), np.asarray(w)
        _check(split, x, w, dy, self.sizes)
        results = run(self.sizes, lambda mesh: _product(mesh, split, x, w, dy))
        self.calls = _calls(results)
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
    if not isinstance(scheme, str):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"{scheme}: no such scheme; use one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def _refuse_idle(split: Split, sizes: Mapping[str, int]) -> None:
    cut = f"{split.m} {split.n} {split.k}".split()
    for axis, size in sizes.items():
        if size > 1 and axis not in cut:
            raise ValueError(
                f"{axis} = {size}: the scheme does not shard any matrix along {axis}; set the "
                "size of this axis to 1"
            )


def _check(split, x, w, dy, sizes):
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"x {x.shape} and w {w.shape}: must be matrices [m, k] and [k, n]")
    if x.dtype != w.dtype or x.dtype not in (np.float32, np.float64):
        raise ValueError(f"x is {x.dtype} and w {w.dtype}: both must be float32 or float64")
    shapes = {"x": x.shape, "w": w.shape, "y": (len(x), w.shape[1])}
    if dy is not None and np.shape(dy) != shapes["y"]:
        raise ValueError(f"dy {np.shape(dy)}: must be {shapes['y']}, the shape of x @ w")
    for name, shape in shapes.items():
        for dim, (size, axes) in enumerate(zip(shape, getattr(split, name), strict=True)):
            parts = prod(sizes.get(axis, 1) for axis in axes)
            if size % parts:
                raise ValueError(f"{name} {shape}: dimension {dim} must be divisible by {parts}")


def _product(mesh: Mesh, split: Split, x: Array, w: Array, dy: Array | None) -> _Done:
    recorder = MemoryRecorder(mesh.rank, lambda: 0)
    product = sharded_matmul(mesh.traced(recorder), split)
    block = {
        name: np.ascontiguousarray(whole[getattr(split, name).slices(whole.shape, mesh)])
        for name, whole in (("x", x), ("w", w), ("y", dy))
        if whole is not None
    }
    blocks: tuple[Array, ...]
    if dy is None:
        blocks = (product.forward(block["x"], block["w"]),)
    else:
        blocks = product.backward(block["x"], block["w"], block["y"])
    axes = [group["axis"] for group in recorder.header["groups"]]
    return _Done(mesh, blocks, moved_by(recorder.rows(), axes))


def _calls(results: Sequence[_Done]) -> list[Received]:
    calls: Counter[tuple[str, str]] = Counter()
    received = calls.copy()
    for done in results:
        for key, (count, amount) in done.moved.items():
            calls[key] += count
            received[key] += amount
    ranks = len(results)
    return [
        Received(axis, op, count / ranks, received[axis, op] / ranks)
        for (axis, op), count in calls.items()
    ]
