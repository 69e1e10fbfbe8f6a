"""Create the communicators along the axes of a device mesh, for any of the transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from mpi4py import MPI

from hpc3d.comm.all_pairs import AllPairs, shortest_exchange
from hpc3d.comm.comm_stream import CommStream
from hpc3d.comm.communicator import Communicator
from hpc3d.comm.cuda_aware_mpi import CudaAwareMessages, CudaAwareMpi
from hpc3d.comm.host_staged import HostStaged
from hpc3d.comm.mesh import queue_of
from hpc3d.comm.nccl import Nccl, grouped, split
from hpc3d.cuda.device import QUEUES, DevicePool

# Dict from axis to (sub-communicator, ranks of its members).
Lines = Mapping[str, tuple[MPI.Intracomm, Sequence[int]]]


def communicators(
    transport: str, cart: MPI.Intracomm, lines: Lines, pool: DevicePool
) -> dict[str, Communicator]:
    """Return a dict from axis to communicator; `pool` provides the device memory for blocks.

    `lines` maps each axis to a sub-communicator of `cart`, or to `cart` itself.  The call is
    collective over `cart`: all ranks pass the same axes in the same order.
    """
    pool.device.meanwhile.append(MPI.COMM_SELF.Iprobe)
    return _MAKERS[transport](cart, lines, pool)


def _by_nccl(cart: MPI.Intracomm, lines: Lines, pool: DevicePool) -> dict[str, Communicator]:
    from cupy.cuda import nccl as library

    device = pool.device
    keys = {axis: (members[0], line.rank) for axis, (line, members) in lines.items()}
    world, parts = split(library, cart, keys)
    device.meanwhile += [part.check_async_error for part in parts.values()]
    device.aborts += [comm.abort for comm in (*parts.values(), world)]
    traffic = {queue: CommStream(device, grouped(library), queue) for queue in QUEUES}
    return {
        axis: Nccl(parts[axis], line, traffic[queue_of(axis)], members, pool)
        for axis, (line, members) in lines.items()
    }


def _by_mpi(cart: MPI.Intracomm, lines: Lines, pool: DevicePool) -> dict[str, CudaAwareMpi]:
    return {axis: CudaAwareMpi(line, members, pool) for axis, (line, members) in lines.items()}


def _by_hosts(
    cart: MPI.Intracomm,
    lines: Lines,
    pool: DevicePool,
    direct: Mapping[str, CudaAwareMpi] | None = None,
) -> dict[str, Communicator]:
    """Return a dict from axis to host-staged communicator.

    If `direct` is given, its CUDA-aware communicators transfer the point-to-point messages.
    """
    found: dict[str, Communicator] = {}
    device = pool.device
    traffic = {queue: CommStream(device, nullcontext, queue) for queue in QUEUES}
    long = shortest_exchange(cart)
    for axis, (line, members) in lines.items():
        staged = partial(CudaAwareMessages, direct[axis]) if direct else HostStaged
        comm = AllPairs(line, members, device.pinned, long)
        found[axis] = staged(comm, traffic[queue_of(axis)], device.pinned, pool)
    return found


def _by_messages(cart: MPI.Intracomm, lines: Lines, pool: DevicePool) -> dict[str, Communicator]:
    return _by_hosts(cart, lines, pool, _by_mpi(cart, lines, pool))


_MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "nccl": _by_nccl,
    "mpi": _by_mpi,
    "mpi-messages": _by_messages,
    "host-staged": _by_hosts,
    "none": lambda cart, lines, pool: {},
}
