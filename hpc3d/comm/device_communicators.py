"""The communicators along the axes of a mesh of devices, by each way of cluster.transport."""

from contextlib import nullcontext

from mpi4py import MPI

from hpc3d.comm.comm_stream import CommStream
from hpc3d.comm.cuda_aware_mpi import CudaAwareMessages, CudaAwareMpi
from hpc3d.comm.host_staged import HostStaged
from hpc3d.comm.mesh import queue_of
from hpc3d.comm.mpi import MpiCommunicator
from hpc3d.comm.nccl import Nccl, grouped, split
from hpc3d.cuda.device import QUEUES


def communicators(transport, cart, lines, pool):
    """{axis: communicator} for `lines`, {axis: (part of `cart`, ranks of its members)}, with their
    blocks in `pool` on a device.  Collective over `cart`, for the same axes in the same order."""
    pool.device.meanwhile.append(MPI.COMM_SELF.Iprobe)
    return MAKERS[transport](cart, lines, pool)


def by_nccl(cart, lines, pool):
    from cupy.cuda import nccl as library

    device = pool.device
    places = {axis: (members[0], line.rank) for axis, (line, members) in lines.items()}
    world, parts = split(library, cart, places)
    device.meanwhile += [part.check_async_error for part in parts.values()]
    device.aborts += [comm.abort for comm in (*parts.values(), world)]
    traffic = comm_streams(device, grouped(library))
    return {
        axis: Nccl(parts[axis], line, traffic[queue_of(axis)], members, pool)
        for axis, (line, members) in lines.items()
    }


def by_mpi(cart, lines, pool):
    return {
        axis: CudaAwareMpi(line, pool.device, members, pool)
        for axis, (line, members) in lines.items()
    }


def by_hosts(cart, lines, pool):
    return {axis: HostStaged(**how) for axis, how in through_hosts(lines, pool).items()}


def by_messages(cart, lines, pool):
    direct = by_mpi(cart, lines, pool)
    return {
        axis: CudaAwareMessages(direct[axis], **how)
        for axis, how in through_hosts(lines, pool).items()
    }


def through_hosts(lines, pool):
    """{axis: what a HostStaged is made of}; hosts receive in memory that devices copy
    themselves."""
    pinned, traffic = pool.device.pinned, comm_streams(pool.device, nullcontext)
    return {
        axis: {
            "comm": MpiCommunicator(line, members, pinned),
            "traffic": traffic[queue_of(axis)],
            "pinned": pinned,
            "pool": pool,
        }
        for axis, (line, members) in lines.items()
    }


def comm_streams(device, group):
    """The CommStream of each queue."""
    return {queue: CommStream(device, group, queue) for queue in QUEUES}


MAKERS = {
    "nccl": by_nccl,
    "mpi": by_mpi,
    "mpi-messages": by_messages,
    "host-staged": by_hosts,
    "none": lambda cart, lines, pool: {},
}
