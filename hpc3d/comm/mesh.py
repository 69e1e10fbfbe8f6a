"""Where a rank stands: named axes, a coordinate on each, a communicator along each."""

from hpc3d.comm.communicator import Self
from hpc3d.comm.grid import Grid

AXES = ("p", "d", "c", "e", "x", "y", "z")
DATA = "d"
WORLD = "world"  # what the group of all ranks lies along


def queue_of(axis):
    """The queue of the calls along an axis.  A queue runs its calls in the order of the program,
    beside the other one: what replicas sum at the end of a step is long, and nothing that a pass
    waits for stands behind it."""
    return "replicas" if axis == DATA else "blocks"


def along(axis):
    """Where a call goes, in words."""
    return "over all ranks" if axis == WORLD else f"along {axis}"


class Scope:
    """A context whose events are of another layer or phase; after it they are what they were.

    To enter it and to leave it is the same: recorder and scope exchange their values.
    """

    __slots__ = ("layer", "phase", "recorder")

    def __init__(self, recorder, layer, phase):
        self.recorder, self.layer, self.phase = recorder, layer, phase

    def __enter__(self, *exception):
        recorder = self.recorder
        if self.layer is not None:
            recorder.layer, self.layer = self.layer, recorder.layer
        if self.phase is not None:
            recorder.phase, self.phase = self.phase, recorder.phase

    __exit__ = __enter__


class NullRecorder:
    """The recorder of a mesh that nobody traces."""

    step = layer = -1
    phase = "other"
    communication = 0

    def span(self, name, op="elementwise", flops=0):
        return self

    def scope(self, layer=None, phase=None):
        return Scope(self, layer, phase)

    def at(self, stage, chunk, microbatch):
        pass

    def synchronise(self):
        pass

    def mark(self, name):
        pass

    def begin_step(self, number):
        self.step = number

    def end_step(self, *results):
        self.step = -1

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


class NullGuard:
    """The guard of a mesh whose products and messages nobody checks."""

    found = ()

    def begin(self, number, trace):
        pass

    def end(self):
        pass

    def product(self, a, b, c):
        pass

    def compare(self):
        return 0


class Mesh:
    """Axes with sizes, this rank's coordinates, one communicator an axis and one for all ranks.

    An absent axis has size 1, coordinate 0 and the `Self` communicator.  Ranks are in the order of
    a `Grid`, so those along the last axis lie next to each other on a node.  Blocks are in the
    memory of `pool`, which may be a device's; the world speaks of arrays of the host.
    """

    def __init__(self, sizes, coords, comms, world, trace=None, guard=None, pool=None):
        self.sizes, self.coords, self.comms, self.world = sizes, coords, comms, world
        self.rank, self.ranks, self.pool = world.rank, world.size, pool or world.pool
        self.alone = Self(self.pool, world.rank)
        self.trace, self.guard = trace or NullRecorder(), guard or NullGuard()
        self.planes = {}

    def size(self, axis):
        return self.sizes.get(axis, 1)

    def coord(self, axis):
        return self.coords.get(axis, 0)

    def comm(self, axis):
        return self.comms.get(axis, self.alone)

    def count(self, axes):
        """The number of ranks in the plane that `axes` span."""
        return self.plane(axes)[0]

    def index(self, axes):
        """This rank's place in that plane, the last axis varying fastest."""
        return self.plane(axes)[1]

    def plane(self, axes):
        """That number and this place."""
        axes = tuple(axes)
        if axes not in self.planes:
            grid = Grid({axis: self.size(axis) for axis in axes})
            here = grid.rank({axis: self.coord(axis) for axis in axes})
            self.planes[axes] = grid.size, here
        return self.planes[axes]

    def empty(self, shape, dtype, kind="activation"):
        return self.pool.empty(shape, dtype, kind)

    def zeros(self, shape, dtype, kind="activation"):
        return self.pool.zeros(shape, dtype, kind)

    def traced(self, recorder):
        """This mesh with every collective and every span written to `recorder`."""
        comms = self.wrapped(recorder)
        return Mesh(self.sizes, self.coords, *comms, recorder, self.guard, self.pool)

    def guarded(self, ledger):
        """This mesh with every product and every call checked by `ledger`; below the trace."""
        comms = self.wrapped(ledger)
        return Mesh(self.sizes, self.coords, *comms, self.trace, ledger, self.pool)

    def wrapped(self, wrapper):
        """The communicators of all axes and that of all ranks, as `wrapper` wraps them."""
        comms = {axis: wrapper.wrap(comm, axis) for axis, comm in self.comms.items()}
        return comms, wrapper.wrap(self.world, WORLD) if self.ranks > 1 else self.world
