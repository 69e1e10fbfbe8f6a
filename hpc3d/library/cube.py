"""A cube of ranks that are threads of this process, and the sharded product on it.

cube = hpc3d.Cube(x=2, y=2, z=2)
y = cube.matmul(x, w)              # whole arrays in, the whole product out
cube.received                      # calls and bytes by axis and operation
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.comm.grid import Grid
from hpc3d.comm.mesh import AXES
from hpc3d.comm.threads import meshes, run
from hpc3d.library.records import Records
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.predict.simulation.summary import moved_by
from hpc3d.tensor.matmul import Matmul
from hpc3d.tensor.split import SCHEMES, Split

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hpc3d.comm.mesh import Mesh
    from hpc3d.tensor.layout import Layout

_MOST = 512  # threads
_AXES = tuple(axis for axis in AXES if axis != "p")  # a product has no stages


class Cube:
    """Ranks on named axes, a thread each: `Cube(x=2, y=3, z=2)` has 12, z varying fastest.

    `received` says what the last product moved: a row for each axis and operation, with the
    `calls` of a rank, the `bytes` that a rank received, the most of any, and `total_bytes`, those
    of all ranks.  Bytes are those of bandwidth-optimal algorithms, with which each of g ranks
    receives (1 - 1/g) w of a gathered block of w bytes (Chan et al. 2007, doi:10.1002/cpe.1206).

    ValueError for axes that a product does not have, and for sizes that are no ranks.
    """

    received: Records

    def __init__(self, **sizes: int) -> None:
        for axis, size in sizes.items():
            if axis not in _AXES:
                raise ValueError(f"axis {axis}: a cube has axes {', '.join(_AXES)}")
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis} = {size!r}: must be a whole number of ranks, 1 or more")
        self.grid = Grid(sizes)
        if self.ranks > _MOST:
            raise ValueError(f"{self.ranks} ranks: a cube of threads has {_MOST} at most")
        self.sizes, self.received = self.grid.sizes, Records()
        self._meshes: list[Mesh] = meshes(sizes)[0]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.grid.size

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"Cube({sizes}): {self.ranks} ranks on threads"

    def matmul(self, x: ArrayLike, w: ArrayLike, scheme: str | Split = "3d") -> np.ndarray:
        """Y[m, n] = X[m, k] W[k, n]: every rank gets its blocks, the ranks multiply, and their
        blocks of Y are put together.

        x: [m, k], w: [k, n]; their common type is that of the product.  `scheme` is a name of
        `hpc3d.SCHEMES` or a `hpc3d.Split`.  ValueError for shapes that do not fit each other or do
        not divide over the axes, and for an axis that the scheme does not use.  The 3-D scheme is
        that of arXiv:2105.14450.
        """
        split = self._split(scheme)
        x, w = _matrices(x=x, w=w)
        m, n = _sizes(x, w)
        self._refuse_uneven(split.y, (m, n), "Y")
        xs, ws = self.shard(x, split.x, "X"), self.shard(w, split.w, "W")

        def product(mesh):
            return Matmul(mesh, split).forward(xs[mesh.rank], ws[mesh.rank])

        return self.unshard(self._run(product), split.y)

    def matmul_backward(
        self, x: ArrayLike, w: ArrayLike, dy: ArrayLike, scheme: str | Split = "3d"
    ) -> tuple[np.ndarray, np.ndarray]:
        """The gradients dX = dY W' [m, k] and dW = X' dY [k, n] of a loss, from dY [m, n].

        The ranks gather X and W again, as after a forward pass that kept only what is stored.
        """
        split = self._split(scheme)
        x, w, dy = _matrices(x=x, w=w, dy=dy)
        if dy.shape != (shape := _sizes(x, w)):
            raise ValueError(f"dy {[*dy.shape]}: x w is {[*shape]}; give a gradient of that shape")
        blocks = [
            self.shard(matrix, layout, name)
            for matrix, layout, name in ((x, split.x, "X"), (w, split.w, "W"), (dy, split.y, "dY"))
        ]

        def gradients(mesh):
            return Matmul(mesh, split).backward(*(each[mesh.rank] for each in blocks))

        dxs, dws = zip(*self._run(gradients), strict=True)
        return self.unshard(dxs, split.x), self.unshard(dws, split.w)

    def shard(self, whole: np.ndarray, layout: Layout, name: str = "array") -> list[np.ndarray]:
        """The block of each rank, in rank order, of a `whole` array that is stored as `layout`
        says (`hpc3d.SCHEMES["3d"].x`, .w and .y are layouts)."""
        self._refuse_uneven(layout, whole.shape, name)
        return [
            np.ascontiguousarray(whole[layout.slices(whole.shape, mesh)]) for mesh in self._meshes
        ]

    def unshard(self, blocks: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
        """The whole array of the blocks of all ranks, in rank order: what `shard` undoes."""
        largest = max(blocks, key=np.size)
        counts = [self._meshes[0].count(axes) for axes in layout]
        whole = np.empty([size * n for size, n in zip(largest.shape, counts)], largest.dtype)
        for mesh, block in zip(self._meshes, blocks, strict=True):
            whole[layout.slices(whole.shape, mesh)] = block
        return whole

    def _refuse_uneven(self, layout: Layout, shape: Sequence[int], name: str) -> None:
        try:
            layout.slices(shape, self._meshes[0])
        except ValueError as error:
            raise ValueError(f"{name} {[*shape]}: {error}") from None

    def _split(self, scheme: str | Split) -> Split:
        """The Split of a scheme; ValueError if it is not known, or leaves ranks without work."""
        if isinstance(scheme, str):
            split = SCHEMES.get(scheme)
        else:
            split, scheme = scheme, "of that split"
        if split is None:
            near = get_close_matches(scheme, SCHEMES, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"scheme = {scheme!r}: {hint}known are {', '.join(SCHEMES)}")
        cut = f"{split.m} {split.n} {split.k}".split()
        for axis, size in self.sizes.items():
            if size > 1 and axis not in cut:
                raise ValueError(
                    f"{axis} = {size}: the scheme {scheme} does not split along {axis}; use 1"
                )
        return split

    def _run(self, function: Callable[[Mesh], Any]) -> list[Any]:
        """The results of `function(mesh)` on all ranks; `received` is what its calls moved."""
        recorders = {}

        def recorded(mesh):
            recorder = recorders[mesh.rank] = MemoryRecorder(mesh.rank, time.monotonic_ns)
            return function(mesh.traced(recorder))

        results = run(self.sizes, recorded)
        self.received = _received(recorders.values())
        return results


def _matrices(**named: ArrayLike) -> list[np.ndarray]:
    """Matrices of one type; ValueError for what is none."""
    found = {name: np.asarray(each) for name, each in named.items()}
    for name, each in found.items():
        if each.ndim != 2 or each.dtype.kind not in "iuf":
            raise ValueError(
                f"{name} {[*each.shape]} of {each.dtype}: must be a matrix of real numbers"
            )
    return [each.astype(np.result_type(*found.values()), copy=False) for each in found.values()]


def _sizes(x: np.ndarray, w: np.ndarray) -> tuple[int, int]:
    """The shape of x w."""
    if x.shape[1] != w.shape[0]:
        raise ValueError(
            f"x {[*x.shape]} and w {[*w.shape]}: the columns of x are not as many as the rows of w"
        )
    return x.shape[0], w.shape[1]


def _received(recorders: Iterable[MemoryRecorder]) -> Records:
    """The rows of `Cube.received`."""
    calls: Counter[tuple[str, str]] = Counter()
    most, total = calls.copy(), calls.copy()
    for recorder in recorders:
        axes = [group["axis"] for group in recorder.header["groups"]]
        for key, (count, nbytes) in moved_by(recorder.rows(), axes).items():
            calls[key] = max(calls[key], count)
            most[key] = max(most[key], nbytes)
            total[key] += nbytes
    return Records(
        {
            "axis": axis,
            "op": op,
            "calls": calls[axis, op],
            "bytes": most[axis, op],
            "total_bytes": total[axis, op],
        }
        for axis, op in sorted(calls)
    )
