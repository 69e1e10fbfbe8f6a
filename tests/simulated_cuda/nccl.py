"""NCCL's C functions, using MPI on host memory; each call is posted on its stream.

A send ends when the receiver takes the message, as NCCL permits. 16-bit sums use float32.
"""

import ctypes
import subprocess
import sys
import time
from ctypes import POINTER, c_int, c_size_t, c_void_p
from hashlib import sha256

import numpy as np

from tests.cuda import emulator
from tests.fakes.places import array_at
from tests.simulated_cuda import device
from tests.simulated_cuda.device import LATE, Table, streams
from tests.simulated_cuda.kernels import FOLDER

C_NAMES = {c_void_p: "void*", c_int: "int", c_size_t: "size_t", POINTER(c_int): "int*"}
ENDS, WHERE = (c_void_p, c_void_p, c_size_t, c_int), (c_void_p, c_void_p)  # communicator, stream
MESSAGE = (c_void_p, c_size_t, c_int, c_int, *WHERE)
ASKED = (c_void_p, POINTER(c_int))
PROTOTYPES = {
    "GetVersion": (POINTER(c_int),),
    "GetUniqueId": (c_void_p,),
    "CommSplit": (c_void_p, c_int, c_int, c_void_p, c_void_p),
    "CommCount": ASKED,
    "CommUserRank": ASKED,
    "CommCuDevice": ASKED,
    "CommGetAsyncError": ASKED,
    "CommDestroy": (c_void_p,),
    "CommAbort": (c_void_p,),
    "CommInitAll": (c_void_p, c_int, c_void_p),
    "AllReduce": (*ENDS, c_int, *WHERE),
    "Broadcast": (*ENDS, c_int, *WHERE),
    "Reduce": (*ENDS, c_int, c_int, *WHERE),
    "AllGather": (*ENDS, *WHERE),
    "ReduceScatter": (*ENDS, c_int, *WHERE),
    "Bcast": MESSAGE,
    "Send": MESSAGE,
    "Recv": MESSAGE,
    "GroupStart": (),
    "GroupEnd": (),
}
# The only one with a structure as a parameter, CommInitRankConfig, is handed on by its address.
INIT = (c_void_p, c_int, c_void_p, c_int, c_void_p)
SUMMED = {0: np.add, 2: np.maximum}
SUCCESS, FAILED, VERSION = 0, 3, 22807


def library():
    """Build the shared library whose functions call those set with `put`."""
    names = {**PROTOTYPES, "Init": INIT}
    lines = ["#include <stddef.h>", "#include <string.h>", "struct Id { char bytes[128]; };"]
    lines += ['extern "C" {']
    for name, kinds in names.items():
        typed = ", ".join(f"{C_NAMES[kind]} a{n}" for n, kind in enumerate(kinds))
        passed = ", ".join(f"a{n}" for n in range(len(kinds)))
        lines += [f"static int (*go{name})({typed});"]
        lines += [f"int nccl{name}({typed}) {{ return go{name}({passed}); }}"]
    lines += ["int ncclCommInitRankConfig(void* made, int count, Id id, int rank, void* how) {"]
    lines += ["    return goInit(made, count, &id, rank, how); }"]
    lines += ['const char* ncclGetErrorString(int) { return "of the simulated NCCL"; }']
    lines += ["void put(const char* name, void* function) {"]
    lines += [f'    if (!strcmp(name, "{n}")) go{n} = (decltype(go{n}))function;' for n in names]
    text = "\n".join([*lines, "}", "}"])
    path = FOLDER / f"nccl-{sha256(text.encode()).hexdigest()}.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{time.monotonic_ns()}")
        command = [emulator.compiler(), "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
        command += ["-x", "c++", "-", "-o", made]
        subprocess.run(command, input=text, text=True, check=True)
        made.replace(path)
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


class AtImport:
    """Module finder that loads this library just before CuPy's NCCL bindings are imported. If it
    were loaded earlier, a torch for GPUs, which requires the real one, would find it."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name == "cupy.cuda.nccl":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(Nccl()))  # as long as the process lives


def install():
    """Replace NCCL by MPI."""
    sys.meta_path.insert(0, AtImport)


class Nccl:
    """NCCL functions, named as in PROTOTYPES; MPI communicators by their handles."""

    def __init__(self):
        self.comms, self.group, self.depth, self.kept = Table(), [], 0, []
        loaded = library()
        for name, kinds in {**PROTOTYPES, "Init": INIT}.items():
            function = ctypes.CFUNCTYPE(c_int, *kinds)(self.guarded(getattr(self, name)))
            self.kept.append(function)
            loaded.put(name.encode(), function)

    def guarded(self, function):
        def call(*arguments):
            try:
                function(*arguments)
            except Exception as error:
                print(f"simulated NCCL: {error!r}", flush=True)
                return FAILED
            return SUCCESS

        return call

    # Communicators

    def GetVersion(self, told):
        told[0] = VERSION

    def GetUniqueId(self, place):
        ctypes.memset(place, 7, 128)

    def Init(self, made, count, name, rank, _):
        """Create a communicator of COMM_WORLD, or of this rank only."""
        from mpi4py import MPI

        comm = MPI.COMM_WORLD if count == MPI.COMM_WORLD.size else MPI.COMM_SELF
        assert ctypes.string_at(name, 128) == 128 * b"\7"
        assert (comm.size, comm.rank) == (count, rank)
        self.new(made, comm.Dup())

    def CommSplit(self, comm, color, key, made, _):
        self.new(made, self.comms[comm].Split(color, key))

    def new(self, made, comm):
        c_void_p.from_address(made).value = self.comms.new(comm)

    def CommCount(self, comm, told):
        told[0] = self.comms[comm].size

    def CommUserRank(self, comm, told):
        told[0] = self.comms[comm].rank

    def CommCuDevice(self, comm, told):
        told[0] = device.current()

    def CommGetAsyncError(self, comm, told):
        told[0] = SUCCESS

    def CommDestroy(self, comm):
        pass

    CommAbort = CommDestroy

    # Calls

    def GroupStart(self):
        self.depth += 1

    def GroupEnd(self):
        assert self.depth, "no group has begun"
        self.depth -= 1
        if self.group and not self.depth:
            (stream,) = {stream for stream, _ in self.group}
            calls, self.group = self.group, []
            self.post(stream, [act for _, act in calls])

    def later(self, stream, act):
        """Post `act()`, which may return an MPI request."""
        if self.depth:
            self.group.append((stream, act))
        else:
            self.post(stream, [act])

    def post(self, stream, acts):
        from mpi4py import MPI

        def together():
            time.sleep(LATE)
            MPI.Request.Waitall([*filter(None, [act() for act in acts])])

        streams[stream or 0].post("nccl", together)

    def AllReduce(self, source, target, count, kind, op, comm, stream):
        given, taken, comm = (
            array_at(source, count, kind),
            array_at(target, count, kind),
            self.comms[comm],
        )
        self.later(stream, lambda: np.copyto(taken, summed(comm, given, op)))

    def Reduce(self, source, target, count, kind, op, root, comm, stream):
        given, comm = array_at(source, count, kind), self.comms[comm]

        def act():
            whole = summed(comm, given, op)
            if comm.rank == root:
                array_at(target, count, kind)[...] = whole

        self.later(stream, act)

    def ReduceScatter(self, source, target, count, kind, op, comm, stream):
        comm = self.comms[comm]
        given, taken = array_at(source, count * comm.size, kind), array_at(target, count, kind)
        own = slice(comm.rank * count, (comm.rank + 1) * count)
        self.later(stream, lambda: np.copyto(taken, summed(comm, given, op)[own]))

    def AllGather(self, source, target, count, kind, comm, stream):
        comm = self.comms[comm]
        given, whole = array_at(source, count, kind), array_at(target, count * comm.size, kind)
        self.later(stream, lambda: comm.Allgather(given.view("u1").copy(), whole.view("u1")))

    def Broadcast(self, source, target, count, kind, root, comm, stream):
        comm, taken = self.comms[comm], array_at(target, count, kind)

        def act():
            if comm.rank == root and source != target:
                taken[...] = array_at(source, count, kind)
            comm.Bcast(taken.view("u1"), root)

        self.later(stream, act)

    def Bcast(self, place, count, kind, root, comm, stream):
        self.Broadcast(place, place, count, kind, root, comm, stream)

    def Send(self, source, count, kind, peer, comm, stream):
        given, comm = array_at(source, count, kind), self.comms[comm]
        self.later(stream, lambda: comm.Issend(given.view("u1"), peer))

    def Recv(self, target, count, kind, peer, comm, stream):
        taken, comm = array_at(target, count, kind), self.comms[comm]
        self.later(stream, lambda: comm.Irecv(taken.view("u1"), peer))

    def CommInitAll(self, *_):
        raise NotImplementedError


def summed(comm, given, op):
    """Return the sum of the blocks of all members, in their order."""
    whole = np.empty((comm.size, given.size), given.dtype)
    comm.Allgather(given.view("u1"), whole.view("u1"))
    wide = np.promote_types(given.dtype, np.float32) if given.itemsize == 2 else given.dtype
    return SUMMED[op].reduce(whole.astype(wide), axis=0).astype(given.dtype)
