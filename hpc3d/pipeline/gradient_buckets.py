"""Gradient reduction and ZeRO all-gathers over the data axes, in buckets of parameters.

A bucket is a contiguous range of the flat gradient. The user sets its maximum size in bytes.
Reductions of small buckets start earlier; large buckets use more of the network bandwidth (with
latency alpha and time per byte beta, a message of alpha / beta bytes reaches half of the
bandwidth).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, Protocol

from hpc3d.arrays.pool import on_host
from hpc3d.comm.communicator import ready
from hpc3d.comm.mesh import COPIES, plane

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.communicator import Communicator, Pending
    from hpc3d.model.parameters import Parameter, Parameters

# Maximum number of units whose reductions are in flight. The send buffer of a reduction is a copy
# of the gradient. While the gradient of a layer is computed, the copies of at most two layers are
# in memory, and a reduction that takes longer than the backward pass of a layer still overlaps.
UNITS_IN_FLIGHT = 2
GATHERS_IN_FLIGHT = 2  # maximum number of buckets whose values are being gathered


class Compression(Protocol):
    """Interface for a custom reduction of selected gradients.

    hpc3d.training.gradient_compression implements it.
    """

    def takes(self, item: Parameter) -> bool: ...
    def bucket(self, parameters: Parameters, items: Sequence[Parameter]) -> GradientBucket: ...


class Buckets:
    """Buckets that reduce partial gradients and, with ZeRO, all-gather the updated parameters.

    Call `finished(unit)` when the gradient of a unit is complete.  A unit is a component of the
    model, such as the layer "layers.0" (see `Parameter.unit`).  The reduction of a bucket starts
    when all of its units are finished, and ends before the reductions of the second unit after it
    start.  Gradients reduced by `compression` are in separate buckets.

    With local updates, `sums` reduces gradients within a worker. `of_workers` reduces the outer
    gradients over the workers, and `compression` applies only to these.

    If `gathers_later` is true, the updated values are gathered during the forward passes of the
    next step.  Call `start_gathers()` when this step begins, and `gathered(unit)` before a forward
    pass uses a unit.  Call `complete()` before the values are used between two steps.
    """

    def __init__(
        self,
        parameters: Parameters,
        size: int,
        compression: Compression | None = None,
        gathers_later: bool = False,
    ) -> None:
        self.parameters, self.mesh = parameters, parameters.mesh
        self.compression = None if parameters.local else compression
        summed = [item for item in parameters if item.partial]
        parted = [item for item in parameters if parameters.shared_out(item)]
        self.sums = [
            self.sum_of(each) for each in _make_buckets(parameters, summed, size, self.compresses)
        ]
        # Maps each unit to its buckets, except for those that are posted last.
        self.of_unit: dict[str, list[GradientBucket]] = {}
        for bucket in (each for each in self.sums if not each.posted_last):
            for unit in {item.unit for item in bucket.items}:
                self.of_unit.setdefault(unit, []).append(bucket)
        self.gathers = [
            self.bucket(_ValueBucket, _OwnerGather, each)
            for each in _make_buckets(parameters, parted, size)
        ]
        self.gathers.sort(key=self.first_use)
        self.gathers_later, self.outdated = gathers_later, False
        self.ahead: deque[Any] = deque()  # gathers in flight, followed by those to be posted
        self.tied = [item for item in parameters if item.tied_peer is not None]
        local = parameters.local
        self.of_workers = [*_between_workers(parameters, size, compression)] if local else []
        self.begin()

    def bucket(self, shared: type[Bucket], owned: type[Bucket], items: Sequence[Parameter]) -> Any:
        """Create a bucket for `items`.

        The class of the bucket is `owned` if a single replica updates these parameters, and
        `shared` otherwise.
        """
        return (owned if items[0] in self.parameters.owners else shared)(self.parameters, items)

    def compresses(self, item: Parameter) -> bool:
        return self.compression is not None and self.compression.takes(item)

    def sum_of(self, items: Sequence[Parameter]) -> GradientBucket:
        """Return the bucket that reduces the gradients of `items`."""
        if self.compression and self.compresses(items[0]):
            return self.compression.bucket(self.parameters, items)
        return self.bucket(GradientBucket, _OwnerSum, items)

    def begin(self) -> None:
        """Set the gradients to zero and start a new step."""
        self.parameters.grad.fill(0)
        self.left = {bucket: {item.unit for item in bucket.items} for bucket in self.sums}
        self.latest: GradientBucket | None = None
        self.in_flight: deque[list[GradientBucket]] = deque()  # the buckets of each unit

    def all_finished(self, units: Collection[str]) -> None:
        """Mark all `units` of a model chunk as finished, after its last backward pass.

        If other units are unfinished, passes of other chunks follow.  All reductions of this chunk
        then start immediately, so that they overlap with these passes, and those of the previous
        chunk are completed.
        """
        early = [left for bucket, left in self.left.items() if not bucket.posted_last]
        others = {*chain(*early)} - {*units}
        most = max(UNITS_IN_FLIGHT, len(units)) if others else UNITS_IN_FLIGHT
        for unit in units:
            self.finished(unit, most)

    def finished(self, unit: str, most: int = UNITS_IN_FLIGHT) -> None:
        """Mark `unit` as finished, and start the reductions of the buckets that are now complete.

        The oldest reductions in flight are completed first, so that the reductions of at most
        `most` units are in flight.  The reductions of `posted_last` buckets start in `wait`.
        """
        here = [bucket for bucket in self.of_unit.get(unit, ()) if bucket in self.left]
        for bucket in here:
            self.left[bucket].discard(unit)
        complete = [bucket for bucket in here if not self.left[bucket]]
        if not complete:
            return
        while len(self.in_flight) >= most:
            for bucket in self.in_flight.popleft():
                bucket.wait()
        self.in_flight.append(complete)
        for bucket in complete:
            self.post(bucket)

    def post(self, bucket: GradientBucket) -> None:
        """Start the reduction of a bucket.

        With hybrid sharding, this also starts the reduction of the previous bucket over the groups
        of replicas, so that it overlaps with the backward pass.
        """
        if self.latest and self.latest.rest[1:] == [COPIES]:
            self.latest.proceed()
        del self.left[bucket]
        bucket.post()
        self.latest = bucket

    def wait(self) -> None:
        """Wait until all gradients are reduced over the replicas.

        With ZeRO, only the shards of this rank contain reduced gradients afterwards.
        """
        assert not self.ahead, "a stage did not call starting(unit)"
        last = [*self.left]
        for bucket in last:
            self.post(bucket)
        for bucket in chain(*self.in_flight, last):
            bucket.wait()

    def sum_over_workers(self) -> None:
        """Sum the gradients over the workers, with at most two buckets in flight.

        Afterwards, the shards of this rank contain the sums.
        """
        for before, bucket in zip([None, *self.of_workers], [*self.of_workers, None], strict=True):
            if bucket:
                bucket.post()
            if before:
                before.wait()

    def sum_tied(self) -> None:
        """Add the gradient of the other copy of a tied embedding table, if there is one.

        The message is sent from host memory on the `world` communicator, so that it cannot be
        matched with a pipeline message.
        """
        for item in self.tied:
            mine = self.parameters.grad[self.parameters.slices[item].own_grad]
            peer = self.mesh.comm("p").members[item.tied_peer]  # type: ignore[index]  # not `None`
            sent = self.mesh.world.send(on_host(mine), peer)
            theirs = self.mesh.world.recv(mine.shape, mine.dtype, peer).wait()
            sent.wait()
            mine += self.mesh.pool.bring(theirs)

    def first_use(self, bucket: Bucket) -> int:
        """Return the index of the first unit of `bucket` in the order of the forward pass."""
        return min(self.parameters.units[item.unit] for item in bucket.items)

    def gather(self) -> None:
        """All-gather the updated values, unless the next step gathers them."""
        self.outdated = True
        if not self.gathers_later:
            self.complete()

    def complete(self) -> None:
        """All-gather the updated values if they have not been gathered since the update."""
        if self.outdated:
            self.start_gathers()
            self.gathered()
            self.outdated = False

    def start_gathers(self) -> None:
        """Start to all-gather the updated values, in the order in which a forward pass uses them.

        At most GATHERS_IN_FLIGHT buckets are in memory.
        """
        self.ahead.extend(self.gathers)
        for bucket in self.gathers[:GATHERS_IN_FLIGHT]:
            bucket.post()

    def gathered(self, unit: str | None = None) -> None:
        """Wait for the values of `unit` and of the units before it, by default of all units.

        When the values of a bucket have been stored, the all-gather of another bucket starts.
        """
        units = self.parameters.units
        last = len(units) if unit is None else units.get(unit, -1)
        while self.ahead and self.first_use(self.ahead[0]) <= last:
            self.ahead.popleft().wait()
            if len(self.ahead) >= GATHERS_IN_FLIGHT:
                self.ahead[GATHERS_IN_FLIGHT - 1].post()


class Bucket:
    """Contiguous parameters that are communicated in a single call.

    If the parameters are sharded, the communicated block has one row per replica. Each row
    contains one replica's shards of all parameters; `columns` lists the column range of each
    parameter.
    """

    pending: Any  # handle of the collective in flight, or `None`

    def __init__(self, parameters: Parameters, items: Sequence[Parameter]) -> None:
        self.parameters, self.mesh, self.items = parameters, parameters.mesh, items
        self.slices = [parameters.slices[item] for item in items]
        sizes = [slices.own for slices in self.slices]
        self.columns = [
            slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))
        ]
        self.replicas, self.parts = plane(items[0].replicas), parameters.parts(items[0])
        self.pending = None

    def _joined(self, parts: Sequence[slice]) -> Array:
        """Copy one part of each parameter's values to a flat block.

        Each part is copied on its own: CuPy's concatenate copies addresses from the host, which is
        impossible while a CUDA graph is captured.
        """
        size = sum(part.stop - part.start for part in parts)
        block = self.mesh.comm(self.replicas).buffer((size,), self.parameters.dtype)
        stop = 0
        for item, part in zip(self.items, parts, strict=True):
            start, stop = stop, stop + part.stop - part.start
            block[start:stop] = self.parameters.read(item, part)
        return block


class GradientBucket(Bucket):
    """Bucket of gradients, reduced over the axes whose ranks hold partial sums of the gradients.

    `post` starts the reduction over the first axis, and `wait` reduces over the remaining axes,
    with the data axes last. Except with hybrid sharding, only the gradients of vectors, such as
    biases, are reduced over more than one axis. If the first axis is a tensor axis, the bucket is
    `posted_last`, because an earlier reduction would delay messages that are on the critical path.
    Along the axis COPIES, ranks reduce their own shards. `axes` replaces the axes of the gradient.
    If `copied` is true, the gradient may change while it is reduced.
    """

    copied = False

    def __init__(
        self, parameters: Parameters, items: Sequence[Parameter], axes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(parameters, items)
        self.axes = axes or items[0].partial
        early = self.axes[0] in (self.replicas, COPIES)
        self.posted_last = items[0].completed_last or not early
        self.span = slice(self.slices[0].grad.start, self.slices[-1].grad.stop)
        self.rest: list[str] = []  # axes of the remaining reductions, including the one in flight

    @property
    def nbytes(self) -> int:
        """Size of the data that `post` holds until `wait`: the copied gradients and their sum."""
        return 2 * self.columns[-1].stop * self.parameters.reduced.itemsize

    def post(self) -> None:
        self.rest = list(self.axes)
        self.pending = self._sum_over(self.rest[0])

    def proceed(self) -> None:
        """Finish the reduction in flight, and start the reduction over the next axis."""
        self.store(self.rest.pop(0), self.pending.wait())
        self.pending = self._sum_over(self.rest[0]) if self.rest else None

    def wait(self) -> None:
        while self.rest:
            self.proceed()

    def _scatters(self, axis: str) -> bool:
        return axis == self.replicas and self.parts > 1

    def _sum_over(self, axis: str) -> Pending:
        comm = self.mesh.comm(axis)
        if self._scatters(axis):
            return comm.reduce_scatter(self._as_parts(comm))
        if axis != COPIES:
            return comm.all_reduce(self._carried(axis))
        if not self.columns[-1].stop:  # another rank updates these parameters
            return ready(self.parameters.grad[:0])
        return comm.all_reduce(self._own_shards(comm))

    def _carried(self, axis: str) -> Array:
        """Return the bucket's gradient, converted to the dtype of the reduction over `axis`."""
        grad, dtype = self.parameters.grad[self.span], self.parameters.reduced
        narrowed = axis in {self.replicas, *self.items[0].replicas, COPIES} and dtype != grad.dtype
        if not (narrowed or self.copied):
            return grad
        block = self.mesh.comm(axis).buffer(grad.shape, dtype)
        block[...] = grad
        return block

    def _as_parts(self, comm: Communicator) -> Array:
        rows = comm.buffer((self.parts, self.columns[-1].stop), self.parameters.reduced)
        for slices, columns in zip(self.slices, self.columns, strict=True):
            rows[:, columns] = self.parameters.grad[slices.grad].reshape(len(rows), -1)
        return rows

    def _own_shards(self, comm: Communicator) -> Array:
        """Return the shards of the gradient that this rank updates, as a flat block."""
        if self.columns[-1].stop == self.span.stop - self.span.start:
            return self._carried(COPIES)
        block = comm.buffer((self.columns[-1].stop,), self.parameters.reduced)
        for slices, columns in zip(self.slices, self.columns, strict=True):
            block[columns] = self.parameters.grad[slices.own_grad]
        return block

    def store(self, axis: str, total: Array) -> None:
        if not self._scatters(axis) and axis != COPIES:
            self.parameters.grad[self.span] = total
            return
        own = total[0] if self._scatters(axis) else total
        for slices, columns in zip(self.slices, self.columns, strict=True):
            self.parameters.grad[slices.own_grad] = own[columns]


class _ValueBucket(Bucket):
    """Bucket of sharded parameters: each replica updates a shard; the shards are all-gathered."""

    def post(self) -> None:
        own = self._joined([slices.own_value for slices in self.slices])
        self.pending = self.mesh.comm(self.replicas).all_gather(own[None])

    def wait(self) -> None:
        rows = self.pending.wait()
        for item, slices, columns in zip(self.items, self.slices, self.columns, strict=True):
            self.parameters.write(item, slices.value, rows[:, columns])
        self.pending = None


class _OwnerSum(GradientBucket):
    """Bucket of unsharded matrices whose gradients are reduced to the rank that updates them."""

    @property
    def owner(self) -> int:
        return self.parameters.owners[self.items[0]]

    def _sum_over(self, axis: str) -> Pending:
        if axis != self.replicas:
            return super()._sum_over(axis)
        return self.mesh.comm(axis).reduce(self._carried(axis), self.owner)

    def store(self, axis: str, total: Array) -> None:
        if axis != self.replicas:
            super().store(axis, total)
        elif self.mesh.comm(axis).rank == self.owner:
            self.parameters.grad[self.span] = total


class _OwnerGather(Bucket):
    """Bucket of unsharded matrices; the rank that updates them broadcasts the new values."""

    def post(self) -> None:
        block = self._joined([slices.value for slices in self.slices])
        owner = self.parameters.owners[self.items[0]]
        self.pending = self.mesh.comm(self.replicas).broadcast(block, owner)

    def wait(self) -> None:
        block, start = self.pending.wait(), 0
        for item, slices in zip(self.items, self.slices, strict=True):
            stop = start + slices.value.stop - slices.value.start
            self.parameters.write(item, slices.value, block[start:stop])
            start = stop
        self.pending = None


def _between_workers(
    parameters: Parameters, size: int, compression: Compression | None
) -> Iterator[GradientBucket]:
    """Yield the buckets that reduce the outer gradients of all parameters over the workers."""
    takes = compression.takes if compression else bool
    trained = [item for item in parameters if not item.frozen]
    for items in _make_buckets(parameters, trained, size, takes):
        if compression and takes(items[0]):
            yield compression.bucket(parameters, items)
        else:
            yield GradientBucket(parameters, items, (COPIES,))


def _make_buckets(
    parameters: Parameters,
    items: Sequence[Parameter],
    size: int,
    apart: Callable[[Parameter], bool] = bool,
) -> Iterator[list[Parameter]]:
    """Group adjacent parameters into buckets; yield each bucket as a list of parameters.

    The parameters of a bucket have the same reduction and the same owner.  The gradients of a
    bucket with several parameters have at most `size` bytes.  Parameters for which `apart` returns
    True are in separate buckets.
    """
    owners, itemsize = parameters.owners, parameters.wide.itemsize
    for _, alike in groupby(
        items,
        lambda item: (
            item.completed_last,
            item.partial,
            item.replicas,
            owners.get(item),
            apart(item),
        ),
    ):
        bucket: list[Parameter] = []
        held = 0
        for item in alike:
            grad = parameters.slices[item].grad
            nbytes = (grad.stop - grad.start) * itemsize
            if bucket and held + nbytes > size:
                yield bucket
                bucket, held = [], 0
            bucket.append(item)
            held += nbytes
        yield bucket
