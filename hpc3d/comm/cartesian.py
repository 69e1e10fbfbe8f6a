"""Mesh of an MPI job: one Cartesian communicator, and one sub-communicator per axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpc3d.arrays.pool import Pool
from hpc3d.comm.all_pairs import AllPairs, shortest_exchange
from hpc3d.comm.communicator import Communicator, Self
from hpc3d.comm.grid import Grid
from hpc3d.comm.mesh import DATA, Mesh, groups_of
from hpc3d.comm.shared_memory import SharedMemory, usable
from hpc3d.comm.stage_mesh import Line, ranks_of, stage_mesh
from hpc3d.comm.two_level import TwoLevel

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda, DevicePool


def build(
    sizes: Mapping[str, int],
    comm: MPI.Intracomm = MPI.COMM_WORLD,
    transport: str = "auto",
    device: Cuda | None = None,
) -> Mesh:
    """Return the mesh of shape `sizes` on `comm`; the last axis in `sizes` varies fastest.

    Groups of ranks on one node use shared memory. Groups that span several hosts, with the same
    number of ranks (two or more) on each host, use shared memory and MPI (two-level). All other
    groups use MPI, and so does every group with `transport="mpi"`. With a `device`
    (hpc3d.cuda.device), blocks are in device memory, and `transport` is the name of a transport in
    hpc3d.comm.transport; blocks of the world communicator are in host memory. The call is
    collective over `comm`.
    """
    grid, pool = Grid(sizes), Pool()
    cart = comm.Create_cart(list(sizes.values()), reorder=False)
    coords = grid.coords(cart.rank)
    nodes, long = _network(cart, transport)

    lines = {}
    for name, members in groups_of(grid, coords).items():
        if name in sizes:
            line: Any = cart.Sub([name == axis for axis in sizes])
        else:
            line = cart.Split(min(members), members.index(cart.rank))
        lines[name] = line, members
    blocks: Any = pool
    if device is None:
        comms = {name: _communicator_of(*line, pool, nodes, long) for name, line in lines.items()}
    else:
        from hpc3d.comm.device_communicators import communicators

        blocks = _blocks(device)
        comms = communicators(transport, cart, lines, blocks)
    world = _communicator_of(cart, range(grid.size), pool, nodes, long)
    return Mesh(grid.sizes, coords, comms, world, pool=blocks)


def _blocks(device: Cuda) -> DevicePool:
    """Return the pool of a rank's arrays in device memory."""
    from hpc3d.comm.pinned_store import PinnedStore
    from hpc3d.cuda.device import DevicePool

    blocks = DevicePool(device)
    blocks.store = PinnedStore(blocks)
    return blocks


def build_stages(
    replicas: Sequence[int],
    rows: int,
    transport: str = "auto",
    device: Cuda | None = None,
    ways: int = 1,
) -> tuple[Mesh, Line]:
    """Return the stage mesh (hpc3d.comm.stage_mesh) of an MPI job, and a communicator factory.

    Transports and the device are chosen as in `build`. The factory creates a communicator for a
    list of ranks.
    """
    comm, pool = MPI.COMM_WORLD.Dup(), Pool()
    nodes, long = _network(comm, transport)
    blocks: Any = pool if device is None else _blocks(device)
    stages = [[*ranks] for ranks in ranks_of(replicas)]

    def line(members):
        made = comm if len(members) == 1 else comm.Create_group(comm.group.Incl([*members]))
        if device is None or len(members) == 1:
            return _communicator_of(made, members, blocks, nodes, long)
        from hpc3d.comm.device_communicators import communicators

        axis = DATA if [*members] in stages else "p"
        return communicators(transport, made, {axis: (made, members)}, blocks)[axis]

    world = _communicator_of(comm, range(comm.size), pool, nodes, long)
    everyone = world if device is None else line(range(comm.size))
    return stage_mesh(replicas, rows, everyone, line, world, ways), line


def _network(comm: MPI.Intracomm, transport: str) -> tuple[list[int | None], float]:
    """Return each rank's node, and the minimum bytes of blocks exchanged between all pairs.

    Shorter blocks use MPI's collectives, except for sums of 16-bit floats. If `transport` is
    "mpi", all nodes are `None`, and the size is infinite. Otherwise, it is finite only if no host
    has a network with remote memory access (`shortest_exchange`).
    """
    if transport == "mpi":
        return [None] * comm.size, inf
    return node_of_rank(comm), shortest_exchange(comm)


def _communicator_of(
    line: MPI.Intracomm,
    members: Sequence[int],
    pool: Pool,
    nodes: Sequence[int | None],
    long: float,
) -> Communicator:
    """Return a communicator based on the MPI communicator `line`; `nodes[r]` is rank r's node.

    Blocks of at least `long` bytes are exchanged between all pairs of ranks.
    """
    if len(members) == 1:
        return Self(pool, members[0])
    hosts = [nodes[rank] for rank in members]
    numbers = set(Counter(hosts).values())
    if None in hosts or len(numbers) > 1 or numbers == {1}:
        return AllPairs(line, members, pool, long)
    if len({*hosts}) == 1:
        return SharedMemory(line, members, pool)
    return TwoLevel(line, members, pool, hosts, long)


def node_of_rank(comm: MPI.Intracomm) -> list[int | None]:
    """Return the node of each rank, identified by the lowest rank on the node.

    An entry is `None` if the ranks of the node cannot share memory.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    can_share = node.allreduce(usable(node.size), MPI.LAND)
    first = node.bcast(comm.rank)
    return comm.allgather(first if can_share else None)
