"""The mesh of an MPI job: one Cartesian communicator, one sub-communicator an axis."""

from mpi4py import MPI

from hpc3d.cluster.arrays import Pool
from hpc3d.cluster.communicator import Self
from hpc3d.cluster.mesh import Mesh
from hpc3d.cluster.mpi import Mpi
from hpc3d.cluster.node import Node, usable


def build(sizes, comm=MPI.COMM_WORLD, transport="auto", device=None):
    """The mesh of `sizes` (axis -> number of ranks, the last varies fastest) on `comm`.

    Groups of ranks that share a node talk through shared memory, the others through MPI;
    `transport="mpi"` lets all of them use MPI.  With a `device` (hpc3d.cluster.cuda) blocks are
    there, and `transport` is one of hpc3d.cluster.transport; the world's are on the host.
    Collective: all ranks make the same calls.
    """
    cart = comm.Create_cart(list(sizes.values()), reorder=False)
    nodes, pool = node_of_rank(cart), Pool()

    def talk(line, members):
        """The communicator of the ranks of `line`, named by their ranks in the mesh."""
        if line.size == 1:
            return Self(pool, cart.rank)
        shared = transport != "mpi" and len({nodes[rank] for rank in members}) == 1
        return (Node if shared and nodes[cart.rank] is not None else Mpi)(line, members, pool)

    lines = {name: cart.Sub([name == other for other in sizes]) for name in sizes}
    lines = {name: (line, ranks(line, cart)) for name, line in lines.items() if line.size > 1}
    coords = dict(zip(sizes, cart.Get_coords(cart.rank), strict=True))
    if device is None:
        comms, blocks = {name: talk(*line) for name, line in lines.items()}, pool
    else:
        from hpc3d.cluster.cuda import DevicePool
        from hpc3d.cluster.lines import communicators

        blocks = DevicePool(device)
        comms = communicators(transport, cart, lines, blocks)
    return Mesh(dict(sizes), coords, comms, talk(cart, ranks(cart, cart)), pool=blocks)


def ranks(line, cart):
    """The ranks in `cart` of the members of a part of it."""
    return MPI.Group.Translate_ranks(line.group, list(range(line.size)), cart.group)


def node_of_rank(comm):
    """The first rank of each rank's node, or None where the node cannot share memory."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    can_share = node.allreduce(usable(node.size), MPI.LAND)
    first = node.bcast(comm.rank)
    return comm.allgather(first if can_share else None)
