"""A machine: how long its ranks take for products, kernels and calls, from a file of facts.

inputs/machines/*.toml are machines; `load` reads one, `dumps` writes one.  A rate or a table that
was measured is kept as knots and interpolated, so that what was measured comes out again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, pairwise
from math import ceil, inf, log, log2
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpc3d.arrays.narrow import itemsize
from hpc3d.config.input_file import STRICT
from hpc3d.predict.machine import between_hosts
from hpc3d.predict.machine.collective_costs import Level, best, hierarchical_all_reduce

if TYPE_CHECKING:
    from hpc3d.predict.machine.between_hosts import Crossing

TYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn")  # of products


class Curve:
    """y(x) through knots, straight in log-log between them and constant beyond them."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x, self.y = tuple(map(float, x)), tuple(map(float, y))
        knots = pairwise(zip(self.x, self.y, strict=True))
        self.power = [log(y1 / y0) / log(x1 / x0) for (x0, y0), (x1, y1) in knots]

    def __call__(self, x: float) -> float:
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
    def curve(self) -> Curve:
        return Curve(self.flop, self.rate)


@dataclass(frozen=True)
class Link:
    """What joins `ranks` consecutive ranks (0: all).

    `alpha_s` is the latency of a message; one rank alone sends `bandwidth` bytes/s over the link,
    all ranks of a node together `node_bandwidth` (0: they do not hinder each other), and one rank
    to one other `pair_bandwidth` (0: all of its own; less where wires join pairs, not a switch).
    """

    __pydantic_config__ = STRICT
    ranks: int
    alpha_s: float
    bandwidth: float
    node_bandwidth: float = 0.0
    pair_bandwidth: float = 0.0

    def beta(self, senders: int, ranks_per_node: int, peers: float = inf) -> float:
        """Seconds a byte of a group of which `senders` ranks of a node send over the link, each to
        as many `peers`, while the other ranks of the node do so in groups of their own."""
        common = (self.node_bandwidth or inf) * min(1, senders / ranks_per_node)
        return 1 / min(senders * self.bandwidth, common, peers * (self.pair_bandwidth or inf))


@dataclass(frozen=True)
class CallTable:
    """A table of measured calls: `seconds` that an `op` takes whose trace says `bytes`.

    The group has `members`, `stride` ranks apart (0: any number of them, on one node); `groups`
    says whether it called "alone" or all groups of the axis "at once".
    """

    __pydantic_config__ = STRICT
    op: str
    members: int
    stride: int
    groups: Literal["alone", "at once"]
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @cached_property
    def curve(self) -> Curve:
        return Curve(self.bytes, self.seconds)

    def time(self, nbytes: float) -> float:
        """Seconds: between the knots in log-log, beyond them as alpha + beta nbytes."""
        x, y = self.bytes, self.seconds
        if x[0] <= nbytes <= x[-1]:
            return self.curve(nbytes)
        if nbytes > x[-1]:
            return y[-1] + (nbytes - x[-1]) * max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        # No negative latency, however the first knots lie.
        beta = min(y[0] / x[0], max(0.0, (y[1] - y[0]) / (x[1] - x[0])))
        return y[0] - (x[0] - nbytes) * beta


class Route(NamedTuple):
    """How the calls of a group go: by a table, else with `alpha` from member to member, `hop`
    between neighbours of a ring, and beta; `spread` instead of beta if each sends to all others.
    Several members on several nodes have two `levels`, on a node and across.
    """

    members: int
    alpha: float
    hop: float
    beta: float
    spread: float
    levels: tuple | None
    tables: dict


def _over_nodes(
    size: int,
    inside: Level,
    across: Level,
    leaving: float,
    tables: dict[str, Callable[[float], float]],
) -> Route:
    """The Route of several members on several nodes; a ring of them takes `leaving` seconds a
    byte from node to node.

    It leaves each node once, through as many adapters as it has members there.  Its steps
    overlap, so that their latency is that of the mean hop, as NCCL reckons (src/graph/tuning.cc).
    A tree has steps inside of nodes and steps across.
    """
    near, far = ceil(log2(inside.members)), ceil(log2(across.members))
    alpha = (near * inside.alpha + far * across.alpha) / (near + far)
    hop = inside.alpha + across.members / size * (across.alpha - inside.alpha)
    elsewhere = (size - inside.members) / (size - 1)  # of the data of an all-to-all
    return Route(
        members=size,
        alpha=alpha,
        hop=hop,
        beta=max(inside.beta, leaving),
        spread=max(inside.beta, elsewhere * across.beta),
        levels=(inside, across),
        tables=tables,
    )


@dataclass(frozen=True)
class Machine:
    """The ranks of a machine and what joins them; `source` tells where the numbers are from.

    A node has `ranks_per_node`; where they outnumber its `cores`, they share them (0: each rank
    has a device).  `memory_gb` is that of a rank.  A kernel takes `launch_s` and the time to move
    its bytes at `memory_bandwidth`, or at its own rate in `kernels`, in bytes/s.  `links` go from
    the innermost outwards.  A core makes calls itself, and goes on with its rank `wakeup_s` after
    what that waited for.  A device's fused attention takes heads up to `max_fused_head_dim` (0:
    it has none), and copies `host_bandwidth` bytes/s to its host or from there (25e9: PCIe 4 x16).
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
    measured: tuple[CallTable, ...] = ()
    wakeup_s: float = 0.0
    max_fused_head_dim: int = 128
    host_bandwidth: float = 25e9

    def product(self, m: int, n: int, k: int, dtype: str, batch: int = 1) -> float:
        """Seconds of `batch` products [m, k] [k, n].

        No product is faster than a launch, and a device moves the operands through its memory
        (S. Williams et al., "Roofline", CACM 52(4), 2009); a core finds them in its caches.
        ValueError where the machine has no rates of the type.
        """
        moved = 0 if self.cores else batch * (m * k + k * n + m * n) * itemsize(dtype)
        return self.fused(2.0 * m * n * k * batch, moved, dtype)

    def fused(self, flop: float, nbytes: float, dtype: str) -> float:
        """Seconds of a kernel of `flop` in products, which moves `nbytes` through its memory."""
        if dtype not in self.gemm:
            raise ValueError(
                f"machine {self.name}: no rates of {dtype} (it has {', '.join(self.gemm)}); add "
                f"[gemm.{dtype}] to its file or train in another type"
            )
        computed = flop / self.gemm[dtype].curve(flop)
        return max(self.launch_s, computed, nbytes / self.memory_bandwidth)

    def kernel(self, name: str, nbytes: float) -> float:
        """Seconds of an elementwise kernel that reads and writes `nbytes` in all."""
        return self.launch_s + nbytes / self.kernels.get(name, self.memory_bandwidth)

    def call(self, op: str, nbytes: float, members: Sequence[int]) -> float:
        """Seconds of a call of the ranks `members` (a tuple or a range) that all groups along
        their axis make at once; `nbytes` is what a trace counts.

        A call is a launch and its messages (collectives.best); where it was measured, the table
        has both.  Between hosts of cores it has parts (hpc3d.predict.machine.between_hosts).
        """
        if len(members) == 1:
            return 0.0
        if self.cores and self.crossing(members):
            return sum(between_hosts.legs(self, op, nbytes, members))
        route = self._routes.get(members) or self._routes.setdefault(members, self.route(members))
        if op in route.tables:
            return route.tables[op](nbytes)
        beta = route.spread if op == "all_to_all" else route.beta
        seconds = best(op, route.members, nbytes, route.alpha, beta, route.hop)
        if op == "all_reduce" and route.levels:
            seconds = min(seconds, hierarchical_all_reduce(nbytes, *route.levels))
        return self.launch_s + seconds

    def crossing(self, members: Sequence[int]) -> Crossing | None:
        """The Crossing of a group (hpc3d.predict.machine.between_hosts); None on one node."""
        members = members if isinstance(members, range) else tuple(members)
        if members not in self._crossings:
            self._crossings[members] = between_hosts.crossing(self, members)
        return self._crossings[members]

    @cached_property
    def _crossings(self) -> dict[tuple[int, ...], Crossing | None]:
        """The crossings that were asked for: members -> Crossing or None."""
        return {}

    @cached_property
    def anywhere(self) -> dict[tuple[str, int], Callable[[float], float]]:
        """(op, members) -> the time that was measured of groups with any stride."""
        return {
            (each.op, each.members): each.time
            for groups in ("alone", "at once")
            for each in self.measured
            if not each.stride and each.groups == groups
        }

    @cached_property
    def _routes(self) -> dict[tuple[int, ...], Route]:
        """The routes that were asked for: members -> Route."""
        return {}

    def route(self, members: tuple[int, ...]) -> Route:
        """The Route of two ranks or more, as many of them on one node as on another."""
        on_node, ranks = self.by_node(members), self.ranks_per_node
        here = max(on_node, key=len)
        near, far = self.link(here), self.link(members)
        inside = Level(len(here), near.alpha_s, near.beta(1, ranks, max(1, len(here) - 1)))
        across = Level(len(on_node), far.alpha_s, far.beta(1, ranks))
        hindered = near.node_bandwidth or far.node_bandwidth
        tables = self.tables(members, alone_serves=inside.members == ranks or not hindered)
        if 1 in (inside.members, across.members):
            _, alpha, beta = inside if across.members == 1 else across
            return Route(len(members), alpha, alpha, beta, beta, None, tables)
        return _over_nodes(len(members), inside, across, far.beta(len(here), ranks), tables)

    def by_node(self, members: Sequence[int]) -> Collection[list[int]]:
        """The members on each node."""
        nodes = defaultdict(list)
        for rank in members:
            nodes[rank // self.ranks_per_node].append(rank)
        return nodes.values()

    def link(self, members: Sequence[int]) -> Link:
        """The innermost link that joins them."""
        low, high = min(members), max(members)
        joins = (not link.ranks or low // link.ranks == high // link.ranks for link in self.links)
        return next(compress(self.links, joins))

    def tables(
        self, members: Sequence[int], alone_serves: bool
    ) -> dict[str, Callable[[float], float]]:
        """op -> the time that was measured for such a group: at once with others, or alone where
        it has its links to itself; for any stride it was measured on one node."""
        ranks, across = sorted(members), len(self.by_node(members)) > 1
        strides = {there - here for here, there in pairwise(ranks)}
        found = {}
        for groups in ("alone", "at once") if alone_serves else ("at once",):
            for table in self.measured:
                fits = {table.stride} == strides if table.stride else not across
                if fits and (table.members, table.groups) == (len(ranks), groups):
                    found[table.op] = table.time
        return found
