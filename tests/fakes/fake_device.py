"""A device that is a thread; operations on its streams are executed later, at any time.

So a race on a real device is also a race here, or is detected. Arrays of results contain arbitrary
values until their call has ended, and the operands of a call must not change before then.
"""

import queue
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from itertools import combinations, starmap

import mpi4py
import numpy as np

from hpc3d.arrays.pool import Pool, contiguous, on_host
from hpc3d.arrays.primitive import add_backend
from hpc3d.comm.comm_stream import CommStream
from hpc3d.comm.host_staged import HostStaged
from hpc3d.comm.mesh import Mesh, queue_of
from hpc3d.comm.nccl import Nccl
from hpc3d.comm.pinned_store import PinnedStore
from hpc3d.cuda.device import QUEUES, Pinned
from tests.fakes.places import array_at

mpi4py.rc.initialize = False  # the calls of MPI are simulated as well
RUBBISH = 0x5A
# Of this thread: `still` is whether the device was waited for, and rests; `tape` records a graph.
HERE = threading.local()


class Tape:
    """CUDA graph: between `begin` and `end`, operations of its thread are only recorded; `launch`
    executes them.

    Memory allocated during the capture contains arbitrary values at the launch.
    """

    immediate = False

    def __init__(self):
        self.noted, self.taken = [], []

    def begin(self):
        HERE.tape = self

    def end(self):
        HERE.tape = None

    def launch(self):
        for array in self.taken:
            plain(array).reshape(-1).view(np.uint8).fill(0xFF)
        for function in self.noted:
            function()


def tape():
    """Return the Tape that records the operations of this thread, or None."""
    return getattr(HERE, "tape", None)


def do(function):
    """Execute an operation, or record it."""
    return tape().noted.append(function) if tape() else function()


class Address:
    """Address of an array, as in CuPy."""

    def __init__(self, ptr):
        self.ptr = ptr


class DeviceArray(np.ndarray):
    """NumPy array with CuPy's address; like CuPy arrays, it cannot be mixed with host arrays."""

    data = property(lambda self: Address(self.ctypes.data))

    def get(self, stream, out, blocking):
        out.view(np.uint8).fill(RUBBISH)
        getattr(stream, "written", []).append(out)
        stream.later([self], lambda: np.copyto(out, plain(self)))

    def set(self, host, stream):
        comes = any(np.may_share_memory(host, each) for each in getattr(stream, "written", ()))
        stream.later([] if comes else [host], lambda: np.copyto(plain(self), host))

    def __setitem__(self, place, value):
        HERE.still = False
        super().__setitem__(place, value)

    def astype(self, *how):
        HERE.still = False
        return super().astype(*how)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        HERE.still = False
        given = {} if out is None else {"out": plain(out)}
        refuse_host([*inputs, *(out or ())])
        result = getattr(ufunc, method)(*plain(inputs), **given, **options)
        return brought(result, type(self))

    def __array_function__(self, function, types, arguments, options):
        HERE.still = False
        refuse_host([*leaves(arguments), *leaves(options)])
        return brought(function(*plain(arguments), **plain(options)), type(self))


def leaves(value):
    """Return the arrays in nested lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


def refuse_host(values):
    if any(type(value) is np.ndarray and value.ndim for value in values):
        raise TypeError("an array of the host among those of the device")


def mapped(function, value):
    """Apply `function` to the arrays in nested lists."""
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [mapped(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value) if isinstance(value, np.ndarray) else value


def plain(value):
    return mapped(lambda array: array.view(np.ndarray), value)


def brought(value, kind=DeviceArray):
    return mapped(lambda array: array.view(kind) if array.ndim else array, value)


def by_numpy(primitive):
    """Apply NumPy's rule of a primitive to device arrays."""
    if not primitive.__module__.startswith("hpc3d.ops"):
        return None

    def on_host(each):
        return (lambda *how: plain(each(*how))) if callable(each) else plain(each)

    def rule(*arguments, **named):
        HERE.still = False
        given = {key: on_host(each) for key, each in named.items()}
        return brought(primitive.numpy(*map(on_host, arguments), **given))

    return rule


def in_one_piece(block):
    HERE.still = False
    return np.ascontiguousarray(block).view(type(block))


add_backend(DeviceArray, by_numpy)
contiguous.register(DeviceArray, in_one_piece)
on_host.register(DeviceArray, lambda array: plain(array).copy())


class Hosts:
    """World communicator, with which hosts communicate."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        return partial(self.call, found) if callable(found) else found

    def call(self, method, *arguments):
        assert not any(isinstance(each, DeviceArray) for each in arguments)
        return method(*arguments)


class DevicePool(Pool):
    kind = DeviceArray

    def empty(self, shape, dtype, kind="activation"):
        array = super().empty(shape, dtype, kind).view(self.kind)
        array.view(np.ndarray).reshape(-1).view(np.uint8).fill(RUBBISH)
        return array

    def shared(self, exporter):
        return super().shared(exporter).view(self.kind)

    def bring(self, array):
        return array.copy().view(self.kind) if isinstance(array, np.ndarray) else array

    def synchronize(self):
        if self.store:
            self.store.settle()


class Event:
    """Position in a stream."""

    def __init__(self, stream, reached):
        self.stream, self.reached = stream, reached

    @property
    def done(self):
        return self.reached.is_set()

    def synchronize(self):
        if not self.reached.wait(120):
            raise TimeoutError("an event that nothing reaches")
        if self.stream.errors:
            raise self.stream.errors[0]


class Compute:
    """Compute stream: the host itself with NumPy, so no work is ever pending."""

    def __init__(self):
        self.recorded, self.errors = 0, []

    def record(self):
        self.recorded += 1
        event = Event(self, threading.Event())
        event.reached.set()
        return event

    def wait_event(self, event):
        do(event.synchronize)


# The messages of a group run at once: first all go out, then all come in.
GO_OUT, COME_IN, ARE_OVER = range(3)


class Sending:
    """Communication stream: a thread that executes posted operations in order, after a delay."""

    ptr = 1

    def __init__(self, seed):
        self.work, self.fresh, self.chance = queue.SimpleQueue(), False, random.Random(seed)
        self.errors, self.group = [], None
        self.written = deque(maxlen=64)  # memory of the host that the stream writes
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while function := self.work.get():
            time.sleep(1e-3 * self.chance.random() ** 8)
            try:
                function()
            except BaseException as error:
                self.errors.append(error)

    @contextmanager
    def grouped(self):
        """Combine the calls of this context into one, whose parts have an order."""
        do(self.open)
        yield
        do(self.close)

    def open(self):
        self.group = []

    def close(self):
        posted, self.group = self.group, None
        targets = [target for *_, target in posted if target is not None]
        overlap = starmap(np.may_share_memory, combinations(targets, 2))
        assert not any(overlap), "messages of a group overwrite each other"
        self.work.put(lambda: [go() for _, go, _ in sorted(posted, key=lambda part: part[0])])

    def later(self, *how):
        do(lambda: self.post(*how))

    def post(self, sources, act, order=GO_OUT, target=None):
        """Execute `act` on the stream; its sources must not change until then."""
        assert self.fresh, "the call does not follow what was computed"
        before = [source.copy() for source in sources]

        def go():
            for source, copy in zip(sources, before, strict=True):
                assert source.tobytes() == copy.tobytes(), "memory was used again too early"
            act()

        if self.group is None:
            self.work.put(go)
        else:
            self.group.append((order, go, target))

    def is_capturing(self):
        return tape() is not None

    def wait_event(self, event):
        do(lambda: setattr(self, "fresh", isinstance(event.stream, Compute)))

    def record(self):
        event = Event(self, threading.Event())
        do(lambda: self.mark(event))
        return event

    def mark(self, event):
        assert self.group is None, "an event inside of a group"
        event.reached.clear()
        self.work.put(event.reached.set)
        self.fresh = False


class Device:
    def __init__(self, seed=0):
        self.compute = Compute()
        self.queues = {queue: Sending(seed) for queue in QUEUES}
        self.pinned = Pinned(bytearray)

    def synchronize(self):
        HERE.still = True


class FakeNccl:
    """NCCL calls on the stream of a device, executed by a communicator of threads."""

    def __init__(self, comm, receipts, stream):
        self.comm, self.receipts, self.stream = comm, receipts, stream

    def rank_id(self):
        return self.comm.rank

    def size(self):
        return self.comm.size

    def check_async_error(self):
        if self.stream.errors:
            raise self.stream.errors[0]

    def move(self, source, target, counts, number, function):
        """Call `function` on the source, and write its result to the target."""
        given = array_at(source, counts[0], number)
        taken = array_at(target, counts[1], number)
        self.stream.later([given], lambda: np.copyto(taken, function(given.copy()).reshape(-1)))

    def allGather(self, source, target, count, number, stream):
        counts = count, count * self.comm.size
        self.move(source, target, counts, number, lambda x: self.comm.all_gather(x).wait())

    def reduceScatter(self, source, target, count, number, op, stream):
        counts = count * self.comm.size, count
        self.move(source, target, counts, number, lambda x: self.comm.reduce_scatter(x).wait())

    def allReduce(self, source, target, count, number, op, stream):
        name = {0: "sum", 2: "max"}[op]
        self.move(
            source, target, (count, count), number, lambda x: self.comm.all_reduce(x, name).wait()
        )

    def broadcast(self, source, target, count, number, root, stream):
        self.move(
            source, target, (count, count), number, lambda x: self.comm.broadcast(x, root).wait()
        )

    def reduce(self, source, target, count, number, op, root, stream):
        def function(x):
            total = self.comm.reduce(x, root).wait()
            return total if self.comm.rank == root else x

        self.move(source, target, (count, count), number, function)

    def send(self, source, count, number, peer, stream):
        """A send is complete when the receiver has the message."""
        given, receipt = array_at(source, count, number), ((1,), np.int8, peer)
        self.stream.later([given], lambda: self.comm.send(given.copy(), peer).wait(), GO_OUT)
        self.stream.later([given], lambda: self.receipts.recv(*receipt).wait(), ARE_OVER)

    def recv(self, target, count, number, peer, stream):
        taken = array_at(target, count, number)

        def receive():
            np.copyto(taken, self.comm.recv((count,), taken.dtype, peer).wait())
            self.receipts.send(np.ones(1, np.int8), peer)

        self.stream.later([], receive, COME_IN, taken)


class Host:
    """Fake MPI for Nccl: provides the number of rows of the root."""

    def __init__(self, comm):
        self.comm = comm

    def bcast(self, value, root):
        mine = np.array([value])[: 1 if self.comm.rank == root else 0]
        return int(self.comm.broadcast(mine, root).wait()[0])


@contextmanager
def on_device(mesh, beside, transport="nccl", kind=CommStream, pool=DevicePool):
    """Return the mesh of a rank on threads, with arrays on a device. `beside` is an equal mesh on
    its own threads, which carries messages of hosts and receipts."""
    device, pool = Device(mesh.rank), pool()
    pool.device = device
    pool.store = PinnedStore(pool)
    traffics = {
        queue: kind(device, stream.grouped, queue=queue) for queue, stream in device.queues.items()
    }

    def talk(axis, comm):
        from hpc3d.comm.cuda_aware_mpi import CudaAwareMessages, CudaAwareMpi
        from tests.fakes.fake_mpi import FakeMpi

        traffic = traffics[queue_of(axis)]
        direct = CudaAwareMpi(FakeMpi(comm), comm.members, pool)
        staged = comm, traffic, Pool(), pool
        if transport in ("mpi", "mpi-messages", "host-staged"):
            made = {"mpi": direct, "mpi-messages": CudaAwareMessages(direct, *staged)}
            return made.get(transport) or HostStaged(*staged)
        nccl, host = FakeNccl(comm, beside.comm(axis), traffic.sending), Host(beside.comm(axis))
        return Nccl(nccl, host, traffic, comm.members, pool)

    comms = {axis: talk(axis, comm) for axis, comm in mesh.comms.items()}
    try:
        yield Mesh(mesh.sizes, mesh.coords, comms, Hosts(mesh.world), pool=pool)
    finally:
        for stream in device.queues.values():
            stream.work.put(None)
