"""Mesh of ranks: named axes, this rank's coordinates, and a communicator along each axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hpc3d.arrays.pass_alternation import PassAlternation
from hpc3d.comm.communicator import Communicator, Self
from hpc3d.comm.grid import Grid

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool

DATA = "d"
COPIES = "r"  # groups of replicas (hybrid sharding, local updates); each has a copy of every shard
CONTEXT = "c"
EXPERTS = "e"
# Names of the groups of ranks that span several data axes (see `data_axes` and `plane`).
PLANES = "c d", "d e", "c d e"
WORLD = "world"  # axis name of the group of all ranks
_SCOPE = "stage", "chunk", "microbatch", "layer", "phase", "part"  # state of a pass in the trace


def data_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes along which ranks process different tokens with the same weights.

    Gradients are reduced over these axes. If there are several such axes, the ranks that they span
    form a single group for this reduction, called a plane. Axis COPIES is excluded, because ZeRO
    does not shard along it; gradients, or with local updates parameters, are reduced along it
    separately.
    """
    return *expert_data_axes(sizes), *([EXPERTS] if sizes.get(EXPERTS, 1) > 1 else [])


def expert_data_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the data axes of expert weights. Axis e is excluded because it shards the experts."""
    return (CONTEXT, DATA) if sizes.get(CONTEXT, 1) > 1 else (DATA,)


def plane(axes: Sequence[str]) -> str:
    """Return the name of the plane (group of ranks) that is spanned by the data axes `axes`."""
    return " ".join(axes)


def groups_of(grid: Grid, coords: Mapping[str, int]) -> dict[str, Sequence[int]]:
    """Return the communication groups of the rank at `coords`, as a dict from name to members.

    Each axis with more than one rank is a group, and so is each plane of several data axes.
    """
    groups: dict[str, Sequence[int]] = {
        axis: grid.ranks_along(axis, coords) for axis, size in grid.sizes.items() if size > 1
    }
    planes = data_axes(grid.sizes), expert_data_axes(grid.sizes)
    groups |= {plane(axes): grid.ranks_over(axes, coords) for axes in planes if len(axes) > 1}
    return groups


def queue_of(axis: str) -> str:
    """Return the name of the queue for communication calls along an axis.

    Each queue runs its calls in program order, concurrently with the other queues.  The long
    gradient reductions at the end of a step have their own queue, so that the communication of a
    forward or backward pass is never queued behind them.  The reductions between the groups of
    replicas in hybrid sharding, which cross hosts, have another queue, so that gathers and
    reductions within a group are not queued behind them.  The all-to-alls of experts also have
    their own queue, so that computation that overlaps with them can use the other axes.
    """
    if axis in (COPIES, EXPERTS):
        return "groups" if axis == COPIES else "experts"
    return "replicas" if axis in (DATA, *PLANES) else "blocks"


def along(axis: str) -> str:
    """Return a phrase for log messages: "over all ranks", or "along AXIS" for a mesh axis."""
    return "over all ranks" if axis == WORLD else f"along {axis}"


class MeshRecorder(Protocol):
    """Interface of a trace recorder, implemented by hpc3d.trace.recorder."""

    step: int
    stage: int
    chunk: int
    layer: int
    microbatch: int
    phase: str
    part: str

    def span(
        self, name: str, op: str = "elementwise", flops: float = 0
    ) -> AbstractContextManager[Any]: ...
    def scope(
        self, layer: int | None = None, phase: str | None = None, part: str | None = None
    ) -> AbstractContextManager[Any]: ...
    def at(self, stage: int, chunk: int, microbatch: int) -> None: ...
    def copying(self, name: str, nbytes: int) -> AbstractContextManager[Any]: ...
    def waiting(self, name: str) -> AbstractContextManager[Any]: ...
    def mark(self, name: str) -> None: ...
    def routed(self, chosen: Any, kept: Any, losses: Any) -> None: ...
    def synchronize(self) -> None: ...
    def begin_step(self, number: int) -> None: ...
    @property
    def end_step(self) -> Callable[..., None]: ...
    @property
    def end_evaluation(self) -> Callable[..., None]: ...
    @property
    def communication(self) -> float: ...


class _MeshGuard(Protocol):
    """Interface of a checker of matrix products and messages (hpc3d.comm.abft.checker).

    `found` lists the error messages.
    """

    found: Sequence[str]

    def begin(self, number: int, trace: MeshRecorder) -> None: ...
    def end(self) -> None: ...
    def product(self, a: Array, b: Array, c: Array) -> None: ...
    def compare(self) -> int: ...


class Wrapper(Protocol):
    """Interface of recorders and checkers that intercept all calls of a communicator."""

    def wrap(self, comm: Communicator, axis: str) -> Any: ...


class Scope:
    """Context manager that sets the layer, phase or part of recorded events.

    It restores the previous values on exit. The part is a sub-block of the model, such as
    "attention".
    """

    __slots__ = ("layer", "part", "phase", "recorder")

    def __init__(
        self, recorder: MeshRecorder, layer: int | None, phase: str | None, part: str | None
    ) -> None:
        self.recorder, self.layer, self.phase, self.part = recorder, layer, phase, part

    def __enter__(self, *exception: object) -> None:
        recorder = self.recorder
        if self.layer is not None:
            recorder.layer, self.layer = self.layer, recorder.layer
        if self.phase is not None:
            recorder.phase, self.phase = self.phase, recorder.phase
        if self.part is not None:
            recorder.part, self.part = self.part, recorder.part

    __exit__ = __enter__


def _ignore(self: Any, *values: object) -> None:
    """Accept any arguments and do nothing."""


class NullRecorder:
    """No-op recorder, for a mesh that is not traced."""

    step = stage = chunk = layer = microbatch = -1
    phase = part = "other"
    communication = 0

    def span(self, name: str, op: str = "elementwise", flops: float = 0) -> AbstractContextManager:
        return self

    def copying(self, *values: object) -> AbstractContextManager:
        return self

    waiting = copying

    def scope(
        self, layer: int | None = None, phase: str | None = None, part: str | None = None
    ) -> AbstractContextManager:
        return Scope(self, layer, phase, part)

    def at(self, stage: int, chunk: int, microbatch: int) -> None:
        self.microbatch = microbatch

    def begin_step(self, number: int) -> None:
        self.step = number

    def end_step(self, *results: object) -> None:
        self.step = -1

    def __enter__(self) -> NullRecorder:
        return self

    synchronize = mark = routed = end_evaluation = __exit__ = _ignore


class NullGuard:
    """No-op checker, for a mesh whose matrix products and messages are not checked."""

    found: Sequence[str] = ()

    begin = end = _ignore

    def product(self, a: Array, b: Array, c: Array) -> None:
        pass

    def compare(self) -> int:
        return 0


class Mesh:
    """Named axes with sizes, this rank's coordinates, and the communicators of this rank.

    There is one communicator per axis, one for each plane of several data axes, and one for all
    ranks.  An absent axis has size 1, coordinate 0 and the `Self` communicator.  Weights have
    replicas along the `data_axes`, expert weights along the `expert_data_axes`; the function
    `plane` returns the name of the communicator over these axes.  Ranks are in the order of a
    `Grid`, so ranks along the last axis are adjacent on a node.  Blocks are allocated from `pool`,
    which may be on a device; the world communicator uses host arrays.  `passes` alternates two
    passes of this rank.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        coords: Mapping[str, int],
        comms: Mapping[str, Communicator],
        world: Communicator,
        trace: MeshRecorder | None = None,
        guard: _MeshGuard | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.sizes, self.coords, self.comms, self.world = sizes, coords, comms, world
        self.rank, self.ranks, self.pool = world.rank, world.size, pool or world.pool
        self.alone = Self(self.pool, world.rank)
        self.data_axes, self.expert_data_axes = data_axes(sizes), expert_data_axes(sizes)
        self.trace: MeshRecorder = trace or NullRecorder()
        self.guard: _MeshGuard = guard or NullGuard()
        self.passes = PassAlternation(self.trace, _SCOPE)
        self.planes: dict[tuple[str, ...], tuple[int, int]] = {}
        self.wrappers: tuple[Wrapper, ...] = ()

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def coord(self, axis: str) -> int:
        return self.coords.get(axis, 0)

    def comm(self, axis: str) -> Communicator:
        return self.comms.get(axis, self.alone)

    def count(self, axes: Iterable[str]) -> int:
        """Return the number of ranks in the plane spanned by `axes`."""
        return self._plane(axes)[0]

    def index(self, axes: Iterable[str]) -> int:
        """Return this rank's index in the plane of `axes`, where the last axis varies fastest."""
        return self._plane(axes)[1]

    def _plane(self, axes: Iterable[str]) -> tuple[int, int]:
        """Return the number of ranks and this rank's index in the plane spanned by `axes`."""
        axes = tuple(axes)
        if axes not in self.planes:
            grid = Grid({axis: self.size(axis) for axis in axes})
            here = grid.rank({axis: self.coord(axis) for axis in axes})
            self.planes[axes] = grid.size, here
        return self.planes[axes]

    def empty(self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation") -> Array:
        return self.pool.empty(shape, dtype, kind)

    def zeros(self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation") -> Array:
        return self.pool.zeros(shape, dtype, kind)

    def traced(self, recorder: Any) -> Mesh:
        """Return a copy of this mesh that records all collectives and spans in `recorder`."""
        return self._wrapped(recorder, recorder, self.guard)

    def guarded(self, ledger: Any) -> Mesh:
        """Return a copy of this mesh whose matrix products and calls are checked by `ledger`."""
        return self._wrapped(ledger, self.trace, ledger)

    def _wrapped(self, wrapper: Wrapper, trace: MeshRecorder, guard: _MeshGuard) -> Mesh:
        comms = {axis: comm.wrapped(wrapper, axis) for axis, comm in self.comms.items()}
        world = wrapper.wrap(self.world, WORLD) if self.ranks > 1 else self.world
        found = Mesh(self.sizes, self.coords, comms, world, trace, guard, self.pool)
        found.wrappers = (*self.wrappers, wrapper)
        return found

    def wrapped(self, comm: Communicator, axis: str) -> Communicator:
        """Apply the wrappers of this mesh to `comm`, another communicator of this rank."""
        for wrapper in self.wrappers:
            comm = comm.wrapped(wrapper, axis)
        return comm
