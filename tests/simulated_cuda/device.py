"""CUDA's runtime and driver, as called by CuPy; memory is host memory, and streams are threads.

Copies, messages and some kernels are slow, so that code that does not wait for their results reads
wrong values. The following are rejected: waits and queries during a capture, captures that are not
joined or that depend on each other, times of incomplete events, sizes beyond a memory block, and
devices that a thread has not selected.
"""

import ctypes
import os
import random
import threading
import time
import traceback
from bisect import bisect_right, insort
from collections import Counter, deque

import numpy as np

DONE, NOT_READY = 0, 600
NO_TIMES = 2  # a flag of events
WRONG = 70  # exit code of a process that did what CUDA would refuse
LATE = 0.001  # seconds that a copy or a message takes; a slow kernel takes SLOW of them
SLOW, SOMETIMES = 5, random.Random(1)
COUNT = int(os.environ.get("SIMULATED_DEVICES", "1"))
PROPERTIES = {"name": b"Simulated", "major": 9, "minor": 0, "totalGlobalMem": 1 << 34}
ATTRIBUTES = {75: 9, 76: 0, 1: 1024, 10: 32, 16: 132, 8: 49152}  # of a device, by CUDA's numbers
posted = Counter()  # what was posted on streams, by name, and what graphs launched of it


class Memory:
    """Memory blocks by their addresses."""

    def __init__(self):
        self.blocks, self.starts = {}, []

    def take(self, size, _=None):
        """Allocate a block with all bits set, so that floating-point numbers are NaN."""
        on_device()
        memory = np.full(size + 512, 0xFF, np.uint8)
        start = memory.ctypes.data // 512 * 512 + 512
        self.blocks[start] = memory, size
        insort(self.starts, start)
        return start

    def give(self, start):
        wait_for_all()
        if start:
            del self.blocks[start]
            self.starts.remove(start)

    def around(self, address):
        """Return (start, bytes) of the block that contains an address, or None."""
        place = bisect_right(self.starts, address) - 1
        if place >= 0 and address < self.starts[place] + self.blocks[self.starts[place]][1]:
            return self.starts[place], self.blocks[self.starts[place]][1]
        return None


class Tape:
    """Captured operations: (stream, name, function, predecessors). For each stream, predecessors
    contain the number of its earlier operations: a vector clock (Fidge; Mattern, 1988)."""

    def __init__(self, origin):
        self.origin, self.posts, self.clocks, self.open = origin, [], {origin: Counter()}, True
        self.launches = 0

    def add(self, stream, name, act):
        clock = self.clocks[stream]
        self.posts.append((stream, name, act, Counter(clock)))
        clock[stream] += 1

    def join(self, stream, clock):
        self.clocks[stream] = self.clocks.get(stream, Counter()) | clock

    def close(self):
        """Only operations that its first stream has waited for form a graph."""
        self.open = False
        unjoined = Counter(stream for stream, *_ in self.posts) - self.clocks[self.origin]
        refuse(unjoined, "a capture ends with streams that are not joined")

    def launch(self):
        """Execute in an allowed order: the first stream runs as far as possible; in the next
        launch, the last one does."""
        lines = {stream: deque() for stream in self.clocks}
        for stream, *post in self.posts:
            lines[stream].append(post)
        order, done = [*lines], Counter()
        self.launches += 1
        for _ in self.posts:
            ready = [each for each in order if lines[each] and lines[each][0][2] <= done]
            stream = ready[-(self.launches % 2)]
            name, act, _ = lines[stream].popleft()
            posted[name] += 1
            act()
            done[stream] += 1


class Stream:
    """Thread that executes operations in order; during a capture, it adds them to `tape`."""

    def __init__(self):
        self.tape, self.waiting, self.idle = None, deque(), True
        self.changed, self.thread = threading.Condition(), None

    def post(self, name, act):
        if self.tape is not None:
            self.tape.add(self, name, act)
            return
        posted[name] += 1
        with self.changed:
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, daemon=True)
                self.thread.start()
            self.waiting.append(act)
            self.idle = False
            self.changed.notify_all()

    def work(self):
        while True:
            with self.changed:
                self.idle = not self.waiting
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.waiting)
                act = self.waiting.popleft()
            try:
                act()
            except BaseException:
                os.write(2, f"simulated CUDA: {traceback.format_exc()}\n".encode())
                os._exit(WRONG)

    def wait(self):
        refuse(self.tape is not None, "a captured stream is waited for")
        with self.changed:
            self.changed.wait_for(lambda: self.idle)


class Event:
    """Event of a stream; `reached` is set when the stream has passed it. A captured event has a
    `tape` and a `clock`."""

    def __init__(self, flags=0):
        self.reached, self.tape, self.clock = threading.Event(), None, None
        self.timed, self.time = not flags & NO_TIMES, None
        self.reached.set()

    def record(self, stream):
        self.reached, self.tape = threading.Event(), stream.tape
        stream.post("event", lambda reached=self.reached: self.come(reached))
        self.clock = Counter(self.tape.clocks[stream]) if self.tape else None

    def come(self, reached):
        self.time = time.monotonic()
        reached.set()

    def check(self):
        refuse(self.tape is not None, "the host asks for a captured event")


def refuse(condition, what):
    if condition:
        raise RuntimeError(f"CUDA would refuse this: {what}")


class Table(dict):
    """Objects by handles."""

    def new(self, thing):
        self[len(self) + 16] = thing  # CUDA's own streams have low numbers
        return len(self) + 15


memory, events, graphs = Memory(), Table(), Table()
streams = Table({0: Stream()})
modules, functions = Table(), Table()
chosen, bound = threading.local(), []  # devices: that of a thread, and the first that was chosen


def choose(number):
    refuse(not 0 <= number < COUNT, f"there is no device {number}")
    chosen.number = number
    bound.append(number)


def current():
    """Return the device of this thread: the first one, if it has not selected any."""
    return getattr(chosen, "number", 0)


def on_device():
    refuse(bound and current() != bound[0], "a thread has not chosen its device")


def check_size(address, size):
    """Check the size of a copy to or from an address within a block."""
    start, length = memory.around(address) or (address, size)
    refuse(address + size > start + length, f"{size} bytes beyond the end of a block")


def wait_for_all():
    for stream in [*streams.values()]:
        if stream.tape is None:
            stream.wait()


def synchronize():
    refuse(any(stream.tape is not None for stream in streams.values()), "a wait in a capture")
    wait_for_all()


def copy(target, source, size, kind):
    synchronize()
    check_size(target, size)
    check_size(source, size)
    ctypes.memmove(target, source, size)


def copy_async(target, source, size, kind, stream):
    def act():
        time.sleep(LATE)
        ctypes.memmove(target, source, size)

    check_size(target, size)
    check_size(source, size)
    streams[stream].post("copy", act)


def fill(target, value, size, stream=0):
    check_size(target, size)
    streams[stream].post("fill", lambda: ctypes.memset(target, value, size))


def query_stream(stream):
    refuse(streams[stream].tape is not None, "the host asks for a captured stream")
    return DONE if streams[stream].idle else NOT_READY


def query_event(event):
    events[event].check()
    return DONE if events[event].reached.is_set() else NOT_READY


def wait_for_event(event):
    events[event].check()
    events[event].reached.wait()


def follow(stream, event, flags=0):
    """Make a stream wait for an event; if the event is captured, the stream is captured too."""
    stream, event = streams[stream], events[event]
    if event.tape is not None:
        refuse(not event.tape.open, "a wait for an event of a capture that is over")
        refuse(stream.tape not in (None, event.tape), "two captures meet")
        stream.tape = event.tape
        stream.tape.join(stream, event.clock)
        return
    refuse(stream.tape is not None, "a capture waits for what is not captured")
    stream.post("wait", event.reached.wait)


def begin_capture(stream, mode=0):
    refuse(streams[stream].tape is not None, "a second capture")
    streams[stream].tape = Tape(streams[stream])


def end_capture(stream):
    tape = streams[stream].tape
    refuse(tape is None or tape.origin is not streams[stream], "this stream began no capture")
    tape.close()
    for each in streams.values():
        each.tape = None if each.tape is tape else each.tape
    return graphs.new(tape)


def launch_graph(graph, stream):
    streams[stream].post("graph", graphs[graph].launch)


def properties(number):
    return PROPERTIES | {"uuid": b"0123456789abcd%02d" % number}


def elapsed(first, last):
    first, last = events[first], events[last]
    for event in (first, last):
        known = event.timed and event.time is not None and event.reached.is_set()
        refuse(not known, "a time of an event that has none")
    return 1e3 * (last.time - first.time)


def nothing(*_):
    return None


def launch(function, *how):
    from tests.simulated_cuda import kernels

    grid, block, (_, stream, parameters, _) = how[:3], how[3:6], how[6:]
    image, name = functions[function]
    on_device()
    name, run = kernels.launched(image, name, grid, block, parameters)

    def act():
        if SOMETIMES.random() < 0.05:
            time.sleep(SLOW * LATE)
        run()

    streams[stream].post(name, act)


RUNTIME = {
    "_ensure_context": nothing,
    "_getCUDAMajorVersion": lambda: 12,
    "driverGetVersion": lambda: 13000,
    "runtimeGetVersion": lambda: 12090,
    "getDeviceCount": lambda: COUNT,
    "getDevice": current,
    "setDevice": choose,
    "getDeviceProperties": properties,
    "deviceGetAttribute": lambda number, device: ATTRIBUTES.get(number, 0),
    "deviceGetPCIBusId": lambda number: f"0000:{number:02d}:00.0",
    "deviceCanAccessPeer": lambda one, other: 0,
    "deviceSynchronize": synchronize,
    "memGetInfo": lambda: (1 << 33, 1 << 34),
    "malloc": memory.take,
    "free": memory.give,
    "hostAlloc": memory.take,
    "freeHost": memory.give,
    "pointerGetMemoryType": lambda address: 2 if memory.around(address) else 0,
    "memcpy": copy,
    "memcpyAsync": copy_async,
    "memset": fill,
    "memsetAsync": fill,
    "streamCreate": lambda: streams.new(Stream()),
    "streamCreateWithFlags": lambda flags: streams.new(Stream()),
    "streamCreateWithPriority": lambda flags, priority: streams.new(Stream()),
    "streamDestroy": nothing,
    "streamSynchronize": lambda stream: streams[stream].wait(),
    "streamQuery": query_stream,
    "streamWaitEvent": follow,
    "streamBeginCapture": begin_capture,
    "streamEndCapture": end_capture,
    "streamIsCapturing": lambda stream: int(streams[stream].tape is not None),
    "eventCreate": lambda: events.new(Event()),
    "eventCreateWithFlags": lambda flags: events.new(Event(flags)),
    "eventDestroy": nothing,
    "eventRecord": lambda event, stream: events[event].record(streams[stream]),
    "eventQuery": query_event,
    "eventSynchronize": wait_for_event,
    "eventElapsedTime": elapsed,
    "graphInstantiate": lambda graph: graph,
    "graphLaunch": launch_graph,
    "graphUpload": nothing,
    "graphDestroy": nothing,
    "graphExecDestroy": nothing,
}
DRIVER = {
    "ctxGetCurrent": lambda: 1,
    "ctxGetDevice": current,
    "streamGetCtx": lambda stream: 1,
    "moduleLoadData": lambda image: modules.new(bytes(image)),
    "moduleUnload": nothing,
    "moduleGetFunction": lambda module, name: functions.new((modules[module], name)),
    "funcGetAttribute": lambda attribute, function: 1024 if attribute == 0 else 0,
    "funcSetAttribute": nothing,
    "launchKernel": launch,
}
