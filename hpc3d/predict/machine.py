"""A machine: how long its ranks take for products, kernels and calls, from a file of facts.

inputs/machines/*.toml are machines; `load` reads one, `dumps` writes one.  A rate or a table that
was measured is kept as knots and interpolated, so that what was measured comes out again.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, log
from typing import Literal, NamedTuple

from hpc3d.config import STRICT, literal, read
from hpc3d.predict.collectives import best, hierarchical_all_reduce

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Curve:
    """y(x) through knots, straight in log-log between them, with none of it beyond them."""

    def __init__(self, x, y):
        self.x, self.y = tuple(map(float, x)), tuple(map(float, y))
        knots = pairwise(zip(self.x, self.y, strict=True))
        self.power = [log(y1 / y0) / log(x1 / x0) for (x0, y0), (x1, y1) in knots]

    def __call__(self, x):
        place = bisect_right(self.x, x) - 1
        if place < 0:
            return self.y[0]
        if place == len(self.power):
            return self.y[-1]
        return self.y[place] * (x / self.x[place]) ** self.power[place]


@dataclass(frozen=True)
class Rates:
    """What products of one type reach: `peak` FLOP/s is what MFU counts against, and a product
    of `flop` floating-point operations reaches `rate` FLOP/s."""

    __pydantic_config__ = STRICT
    peak: float
    flop: tuple[float, ...]
    rate: tuple[float, ...]

    @cached_property
    def of(self):
        return Curve(self.flop, self.rate)


@dataclass(frozen=True)
class Link:
    """What joins `ranks` consecutive ranks (0: all).

    `alpha_s` is the latency of a message; one rank alone sends `bandwidth` bytes/s over the link,
    all ranks of a node together `node_bandwidth` (0: they do not hinder each other).
    """

    __pydantic_config__ = STRICT
    ranks: int
    alpha_s: float
    bandwidth: float
    node_bandwidth: float = 0.0

    def beta(self, senders, ranks_per_node):
        """Seconds a byte of a group of which `senders` ranks of a node send over the link, while
        the other ranks of the node do so in groups of their own."""
        common = self.node_bandwidth or inf
        return 1 / min(senders * self.bandwidth, common * min(1, senders / ranks_per_node))


@dataclass(frozen=True)
class Measured:
    """A table of measured calls: `seconds` that an `op` takes whose trace says `bytes`.

    The group has `members`, `stride` ranks apart; `groups` says whether it called "alone" or all
    groups of the axis "at once".
    """

    __pydantic_config__ = STRICT
    op: str
    members: int
    stride: int
    groups: Literal["alone", "at once"]
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @cached_property
    def of(self):
        return Curve(self.bytes, self.seconds)

    def time(self, nbytes):
        """Seconds: between the knots in log-log, beyond them as alpha + beta nbytes."""
        x, y = self.bytes, self.seconds
        if x[0] <= nbytes <= x[-1]:
            return self.of(nbytes)
        if nbytes > x[-1]:
            return y[-1] + (nbytes - x[-1]) * max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        # No negative latency, however the first knots lie.
        beta = min(y[0] / x[0], max(0.0, (y[1] - y[0]) / (x[1] - x[0])))
        return y[0] - (x[0] - nbytes) * beta


class Route(NamedTuple):
    """How the calls of a group go: a table for some, else alpha and beta along its ring;
    `levels` are (g, alpha, beta) on a node and across, of several members on several nodes."""

    members: int
    alpha: float
    beta: float
    levels: tuple | None
    tables: dict


@dataclass(frozen=True)
class Machine:
    """The ranks of a machine and what joins them; `source` tells where the numbers are from.

    A node has `ranks_per_node`; where they outnumber its `cores`, they share them (0: each rank
    has a device).  `memory_gb` is that of a rank.  A kernel takes `launch_s` and the time to move
    its bytes at `memory_bandwidth`, or at its own rate in `kernels`, in bytes/s.  `links` go from
    the innermost outwards.
    """

    __pydantic_config__ = STRICT
    name: str
    source: str
    ranks_per_node: int
    cores: int
    memory_gb: float
    memory_bandwidth: float
    launch_s: float
    gemm: dict[str, Rates]
    links: tuple[Link, ...]
    kernels: dict[str, float] = field(default_factory=dict)
    measured: tuple[Measured, ...] = ()

    def product(self, m, n, k, dtype, batch=1):
        """Seconds of `batch` products [m, k] [k, n].

        No product is quicker than a launch, and a device moves the operands through its memory
        (S. Williams et al., "Roofline", CACM 52(4), 2009); a core finds them in its caches.
        ValueError where the machine has no rates of the type.
        """
        if dtype not in self.gemm:
            raise ValueError(
                f"machine {self.name}: no rates of {dtype} (it has {', '.join(self.gemm)}); add "
                f"[gemm.{dtype}] to its file or train in another type"
            )
        flop = 2.0 * m * n * k * batch
        moved = 0 if self.cores else batch * (m * k + k * n + m * n) * ITEMSIZE[dtype]
        return max(self.launch_s, flop / self.gemm[dtype].of(flop), moved / self.memory_bandwidth)

    def kernel(self, name, nbytes):
        """Seconds of an elementwise kernel that reads and writes `nbytes` in all."""
        return self.launch_s + nbytes / self.kernels.get(name, self.memory_bandwidth)

    def call(self, op, nbytes, members):
        """Seconds of a call of the ranks `members` (a tuple or a range) that all groups along
        their axis make at once; `nbytes` is what a trace counts.

        A call is a launch and its messages (collectives.best); where it was measured, the table
        has both.
        """
        if len(members) == 1:
            return 0.0
        route = self.routes.get(members) or self.routes.setdefault(members, self.route(members))
        if op in route.tables:
            return route.tables[op](nbytes)
        seconds = best(op, route.members, nbytes, route.alpha, route.beta)
        if op == "all_reduce" and route.levels:
            seconds = min(seconds, hierarchical_all_reduce(nbytes, *route.levels))
        return self.launch_s + seconds

    @cached_property
    def routes(self):
        """The routes that were asked for: members -> Route."""
        return {}

    def route(self, members):
        """The Route of two ranks or more; those on one node lie as densely on the others.

        A ring through all members leaves each node once, through as many adapters as it has
        members there.  Its steps overlap, so that its latency is that of the mean hop, as NCCL
        reckons (src/graph/tuning.cc).
        """
        size, on_node = len(members), self.by_node(members)
        here, nodes = max(on_node, key=len), len(on_node)
        far, ranks = self.link(members), self.ranks_per_node
        if nodes == 1:
            beta, alone = far.beta(1, ranks), far.beta(1, size)
            return Route(size, far.alpha_s, beta, beta, None, self.tables(members, beta == alone))
        beta, alone = far.beta(len(here), ranks), far.beta(len(here), len(here))
        tables = self.tables(members, beta == alone)
        across = nodes, far.alpha_s, far.beta(1, ranks)
        if len(here) == 1:
            return Route(size, far.alpha_s, beta, beta, None, tables)
        near = self.link(here)
        inside = len(here), near.alpha_s, near.beta(1, ranks)
        alpha = near.alpha_s + nodes / size * (far.alpha_s - near.alpha_s)
        levels = (inside, across) if size == nodes * len(here) else None
        spread = (size - len(here)) / (size - 1) * across[2]
        return Route(size, alpha, max(beta, inside[2]), max(spread, inside[2]), levels, tables)
