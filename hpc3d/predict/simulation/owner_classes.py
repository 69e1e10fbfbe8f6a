"""Classes of ranks that do the same work in splits with `own` storage, such as `3d-broadcast`.

In such a split, only the owner of a block processes its rows and stores its optimizer state. Ranks
that own blocks of the same matrices do the same work and form a class, which is represented by one
simulated rank. The first rank of a stage owns a block of every matrix. It does at least as much
work as a rank of any other class, and therefore determines the step time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import WORLD, Mesh, groups_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc3d.comm.grid import Grid
    from hpc3d.config.input_file import Config
    from hpc3d.predict.simulation.stage_turns import StagePeers


class OwnerClasses(NamedTuple):
    """Classes of the ranks of a mesh; class 0 contains rank 0.

    `of_rank` contains the class of each rank. `first` lists the first rank of each class, and
    `counts` the number of ranks of each class per pipeline stage. `together` maps the name of a
    communication group to a boolean matrix [class, class]. An element is True if the two classes
    have ranks in the same group, or are connected through other classes.
    """

    of_rank: np.ndarray
    first: list[int]
    counts: list[int]
    together: dict[str, np.ndarray]


def owner_classes(config: Config) -> OwnerClasses | None:
    """Return the classes of ranks of a layout, or `None` if no block has an owner."""
    grid, split = config.grid(), config.splits["dense"]
    if not split.own:
        return None
    sizes = tuple(grid.sizes.values())
    coords: Any = dict(zip(grid.sizes, np.indices(sizes).reshape(len(sizes), -1)))
    mesh = Mesh(grid.sizes, coords, {}, Self())  # coordinates of all ranks, as arrays
    code = np.zeros(grid.size, int)
    for each in (split, split.next()):
        for layout in (each.x, each.w, each.w_transposed, each.y):
            for axis in layout.owned:
                code = 2 * code + (coords[axis] == layout.owner(axis, mesh))
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    of_rank = np.argsort(order)[number]
    counts = np.bincount(of_rank) // config.mesh.p
    return OwnerClasses(of_rank, first[order].tolist(), counts.tolist(), _together(grid, of_rank))


def _together(grid: Grid, of_rank: np.ndarray) -> dict[str, np.ndarray]:
    count, axes = of_rank.max() + 1, [*grid.sizes]
    found = {WORLD: np.ones((count, count), bool)}
    for name, members in groups_of(grid, {}).items():
        along = [axes.index(axis) for axis in name.split() if axis in axes]
        groups = of_rank.reshape(tuple(grid.sizes.values()))
        groups = np.moveaxis(groups, along, range(-len(along), 0)).reshape(-1, len(members))
        linked = np.eye(count, dtype=bool)
        linked[np.broadcast_to(groups[:, :1], groups.shape), groups] = True
        linked |= linked.T
        for _ in range(count):
            linked = linked @ linked
        found[name] = linked
    return found


class OwnerPeers:
    """Simulated rank of one class of a pipeline stage.

    The rank exchanges times with the ranks of the same class on other stages, as a StagePeers
    does, and it exchanges values with the other classes of its stage. `peers` connects the classes
    of all stages; the peer number of class i of stage s is s * (number of classes) + i.
    """

    def __init__(self, peers: StagePeers, classes: OwnerClasses) -> None:
        self.peers, self.classes, self.among = peers, classes, len(classes.first)
        self.rank, self.number = divmod(peers.rank, self.among)
        self.size = peers.size // self.among
        self.latest = peers.latest

    def send(self, time: int, peer: int) -> None:
        """Send a time in ns to stage `peer`."""
        self.peers.send(time, peer * self.among + self.number)

    def recv(self, peer: int) -> Callable[[], int]:
        """Return a function that waits for a time from stage `peer` and returns it."""
        return self.peers.recv(peer * self.among + self.number)

    @property
    def first(self) -> int:
        """First rank of this class, on the first pipeline stage."""
        return self.classes.first[self.number]

    @property
    def count(self) -> int:
        """Number of ranks of this class per pipeline stage."""
        return self.classes.counts[self.number]

    def values(self, axis: str, value: int) -> dict[int, int]:
        """Exchange a value with the other classes in this rank's group along an axis.

        Returns a dict from class to value.
        """
        me, first = self.number, self.rank * self.among
        together = np.flatnonzero(self.classes.together[axis][me]).tolist()
        others = [each for each in together if each != me]
        for other in others:
            self.peers.send(value, first + other)
        return {me: value} | {other: self.peers.recv(first + other)() for other in others}
