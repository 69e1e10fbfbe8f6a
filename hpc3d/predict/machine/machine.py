"""Machine model, which predicts the times of matrix products, kernels and communication calls.

Machine files are in inputs/machines/*.toml; machine_file.py reads and writes them. Measured rates
and times are interpolated between the stored points, so that the model reproduces the
measurements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import compress, pairwise
from math import ceil, inf, log, log2
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpc3d.arrays.narrow import itemsize
from hpc3d.config.input_file import STRICT
from hpc3d.predict.machine import between_hosts
from hpc3d.predict.machine.collective_costs import (
    RING_OPS,
    Level,
    Protocol,
    best,
    fastest,
    hierarchical_all_reduce,
)
from hpc3d.predict.machine.uplinks import UplinkCost, uplink_cost

if TYPE_CHECKING:
    from hpc3d.predict.machine.between_hosts import Crossing

TYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn")  # dtypes of GEMMs


class Curve:
    """Curve y(x) through given points, with log-log interpolation and constant extrapolation."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x, self.y = tuple(map(float, x)), tuple(map(float, y))
        knots = pairwise(zip(self.x, self.y, strict=True))
        self.power = [log(y1 / y0) / log(x1 / x0) for (x0, y0), (x1, y1) in knots]

    def __call__(self, x: float) -> float:
        index = bisect_right(self.x, x) - 1
        if index < 0:
            return self.y[0]
        if index == len(self.power):
            return self.y[-1]
        return self.y[index] * (x / self.x[index]) ** self.power[index]


@dataclass(frozen=True)
class Rates:
    """Measured rates of matrix products in one dtype.

    A matrix product of `flop` floating-point operations runs at `rate` FLOP/s; the two tuples list
    the measured points. `peak`, in FLOP/s, is the reference for MFU. `sustained` limits the rate
    in training steps, because a GPU reaches its power limit (0: no limit).
    """

    __pydantic_config__ = STRICT
    peak: float
    flop: tuple[float, ...]
    rate: tuple[float, ...]
    sustained: float = 0.0

    @cached_property
    def curve(self) -> Curve:
        limit = self.sustained or inf
        return Curve(self.flop, [min(rate, limit) for rate in self.rate])


class AttentionPass(NamedTuple):
    """Forward or backward pass of fused attention over sequences of `sequence` tokens."""

    head_dim: int
    sequence: int
    causal: bool
    backward: bool


@dataclass(frozen=True)
class AttentionRates:
    """Measured rates of fused attention, in the forward or the backward pass.

    For heads of `head_dim` elements and sequences of `sequence` tokens, the kernel runs at `rate`
    FLOP/s; the two tuples list the measured points. With a causal mask, the FLOPs of the masked
    half of the scores are not counted.
    """

    __pydantic_config__ = STRICT
    head_dim: int
    causal: bool
    backward: bool
    sequence: tuple[float, ...]
    rate: tuple[float, ...]

    @cached_property
    def curve(self) -> Curve:
        return Curve(self.sequence, self.rate)

    def distance(self, case: AttentionPass) -> tuple[bool, bool, float]:
        """Return a sort key: first compare the pass, then the mask, then the head dimension."""
        unlike = self.backward != case.backward, self.causal != case.causal
        return *unlike, abs(log(self.head_dim / case.head_dim))


LEAST_FOR_PERCENTILES = 5  # number of published steps; fewer steps have a range


@dataclass(frozen=True)
class Errors:
    """Ratios of published to predicted step times for one kind of layout.

    `low` and `high` are the 10th and the 90th percentile over `steps` published steps, or the
    minimum and the maximum if there are fewer than `LEAST_FOR_PERCENTILES` steps. `layout` is
    context, experts, sharded or replicated.
    """

    __pydantic_config__ = STRICT
    layout: str
    steps: int
    low: float
    high: float


@dataclass(frozen=True)
class Link:
    """Network link that connects groups of `ranks` consecutive ranks (0: all ranks).

    `alpha_s` is the latency of a message in seconds. Bandwidths are in bytes/s: `bandwidth` limits
    each rank, `node_bandwidth` the total of a node (0: no limit), and `pair_bandwidth` each pair
    of ranks (0: the same as `bandwidth`). `pair_bandwidth` is lower than `bandwidth` if pairs of
    ranks are connected directly, without a switch. `oversubscription` is the ratio of the total
    bandwidth of the ranks that the previous link connects to that of their uplinks (uplinks.py).
    """

    __pydantic_config__ = STRICT
    ranks: int
    alpha_s: float
    bandwidth: float
    node_bandwidth: float = 0.0
    pair_bandwidth: float = 0.0
    oversubscription: float = 1.0

    def beta(self, senders: int, ranks_per_node: int, peers: float = inf) -> float:
        """Return the time per byte, in seconds, of a group that has `senders` ranks on a node.

        Each of them sends to `peers` ranks over this link. The other ranks of the node are assumed
        to send concurrently in the same way, within their own groups.
        """
        common = (self.node_bandwidth or inf) * min(1, senders / ranks_per_node)
        return 1 / min(senders * self.bandwidth, common, peers * (self.pair_bandwidth or inf))


@dataclass(frozen=True)
class CallTable:
    """Table of the measured times of communication operation `op`.

    A call of `bytes` (counted as in a trace) takes `seconds`. The group consists of `members`
    ranks with stride `stride`; stride 0 means any stride on a single node. `groups` is "alone" if
    only this group made calls, and "at once" if all groups of the axis made calls concurrently.
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
        """Return the time of a call in seconds.

        Times are interpolated in log-log scale between the measured sizes, and extrapolated
        linearly (alpha + beta nbytes) outside.
        """
        x, y = self.bytes, self.seconds
        if x[0] <= nbytes <= x[-1]:
            return self.curve(nbytes)
        if nbytes > x[-1]:
            return y[-1] + (nbytes - x[-1]) * max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        # Limit beta so that the extrapolated latency is not negative.
        beta = min(y[0] / x[0], max(0.0, (y[1] - y[0]) / (x[1] - x[0])))
        return y[0] - (x[0] - nbytes) * beta


class Route(NamedTuple):
    """Cost parameters of communication in a group.

    Measured `tables` take precedence. Otherwise, the latency of a message is `alpha` seconds, or
    `hop` seconds between neighbors in a ring. Each byte takes `beta` seconds, or `spread` seconds
    in an all-to-all. The members are on `nodes` nodes. If the group has several members on each of
    several nodes, `levels` contains the `Level` within the nodes and the `Level` across the nodes.
    """

    members: int
    nodes: int
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
    leaving: UplinkCost,
    tables: dict[str, Callable[[float], float]],
) -> Route:
    """Return the Route of a group with several members on each of several nodes.

    `leaving.beta` is the time per byte, in seconds, of the ring's traffic between nodes, which is
    spread over one NIC per member on the node. `leaving.spread` is the time per byte that an
    all-to-all takes on oversubscribed uplinks. The latency of a ring step is the mean over all
    hops of the ring, because its steps overlap, as in NCCL (src/graph/tuning.cc). The latency of a
    tree step is the mean over the steps within and across nodes.
    """
    near, far = ceil(log2(inside.members)), ceil(log2(across.members))
    alpha = (near * inside.alpha + far * across.alpha) / (near + far)
    hop = inside.alpha + across.members / size * (across.alpha - inside.alpha)
    # Fraction of the all-to-all data sent to other nodes.
    elsewhere = (size - inside.members) / (size - 1)
    return Route(
        members=size,
        nodes=across.members,
        alpha=alpha,
        hop=hop,
        beta=max(inside.beta, leaving.beta),
        spread=max(inside.beta, elsewhere * across.beta, leaving.spread),
        levels=(inside, across),
        tables=tables,
    )


@dataclass(frozen=True)
class Machine:
    """Performance model of a machine; `source` states where its numbers come from.

    A node has `ranks_per_node` ranks and `cores` CPU cores. If there are fewer cores than ranks,
    ranks share cores; if `cores` is 0, each rank has a GPU. If two nodes share a core, as emulated
    hosts do, `cores` is 0.5. `memory_gb` is the memory per rank. A kernel takes `launch_s` seconds
    plus the time to move its bytes at `memory_bandwidth` or at its own bandwidth in `kernels`, in
    bytes/s. Without tables in `attention`, fused attention runs at the rate of a matrix product
    with as many FLOPs. `links` are ordered from the innermost to the outermost. Without GPUs,
    communication uses the cores, and a waiting rank resumes with a delay of `wakeup_s` seconds.
    With GPUs, each collective and each message starts `dispatch_s` seconds after the rank reaches
    it, because the host has to post it. If `host_s` is positive, the host needs this time to
    launch a kernel, and `dispatch_s` (default: `host_s`) to post a call, while the GPU computes.
    Work in a CUDA graph takes none of these times; the graph itself takes `launch_s` and `host_s`.
    While a collective runs, kernels take longer by the factor `contention`, because the collective
    uses multiprocessors and memory bandwidth. Fused attention on GPUs supports heads of up
    to `max_fused_head_dim` elements (0: no fused attention). Copies between a GPU and its host run
    at `host_bandwidth` bytes/s (25e9: PCIe 4 x16).
    """

    __pydantic_config__ = STRICT
    name: str
    source: str
    ranks_per_node: int
    cores: float
    memory_gb: float
    memory_bandwidth: float
    launch_s: float
    gemm: dict[str, Rates]
    links: tuple[Link, ...]
    kernels: dict[str, float] = field(default_factory=dict)
    measured: tuple[CallTable, ...] = ()
    attention: tuple[AttentionRates, ...] = ()
    protocols: tuple[Protocol, ...] = ()
    errors: tuple[Errors, ...] = ()
    wakeup_s: float = 0.0
    dispatch_s: float = 0.0
    contention: float = 1.0
    host_s: float = 0.0
    max_fused_head_dim: int = 128
    host_bandwidth: float = 25e9

    def with_ranks(self, ranks: int) -> Machine:
        """Return the machine with at most `ranks` ranks per node.

        If nothing changes, the same object is returned, because it caches the routes of groups.
        """
        return self if self.ranks_per_node <= ranks else replace(self, ranks_per_node=ranks)

    @cached_property
    def captured(self) -> Machine:
        """The machine for work in a CUDA graph, which the host launches in a single call."""
        return replace(self, launch_s=0.0, dispatch_s=0.0, host_s=0.0)

    def product(self, m: int, n: int, k: int, dtype: str, batch: int = 1) -> float:
        """Return the time in seconds of `batch` matrix products [m, k] x [k, n].

        The time is at least the launch time and, on a GPU, at least the time to move the operands
        through memory (S. Williams et al., "Roofline", CACM 52(4), 2009). On CPU cores, operands
        are assumed to be in cache. Raises ValueError if the machine has no rates for the dtype.
        """
        moved = 0 if self.cores else batch * (m * k + k * n + m * n) * itemsize(dtype)
        return self.fused(2.0 * m * n * k * batch, moved, dtype)

    def fused_attention(
        self, flop: float, nbytes: float, dtype: str, case: AttentionPass
    ) -> float:
        """Return the time in seconds of a fused attention kernel.

        The kernel computes `flop` FLOPs, and moves `nbytes` through memory.
        """
        if self.attention:
            table = min(self.attention, key=lambda rates: rates.distance(case))
            return self._roofline(flop, table.curve(case.sequence), nbytes)
        return self.fused(flop, nbytes, dtype)

    def _roofline(self, flop: float, rate: float, nbytes: float) -> float:
        return max(self.launch_s, flop / rate, nbytes / self.memory_bandwidth)

    def fused(self, flop: float, nbytes: float, dtype: str) -> float:
        """Return the time in seconds of a kernel that computes at the rate of a matrix product.

        The kernel computes `flop` FLOPs, and moves `nbytes` through memory.
        """
        if dtype not in self.gemm:
            raise ValueError(
                f"machine {self.name}: no GEMM rates for {dtype}, only {', '.join(self.gemm)}; "
                f"add [gemm.{dtype}] to the machine file (docs/prediction.md#machines), or train "
                "in another data type"
            )
        return self._roofline(flop, self.gemm[dtype].curve(flop), nbytes)

    def kernel(self, name: str, nbytes: float) -> float:
        """Return the time in seconds of an elementwise kernel that moves `nbytes` in total."""
        return self.launch_s + nbytes / self.kernels.get(name, self.memory_bandwidth)

    def call(self, op: str, nbytes: float, members: Sequence[int]) -> float:
        """Return the time in seconds of a communication call.

        All groups along the axis are assumed to make the call concurrently. `members` are the
        ranks of one group (a tuple or a range), and `nbytes` is the size of the call as counted in
        the column `bytes` of a trace. A measured time is returned if the machine has one.
        Otherwise, the result is the time of NCCL's fastest protocol if the machine has `protocols`
        (collective_costs.fastest), and the launch time plus the transfer time if it has none
        (collective_costs.best). For calls between hosts without GPUs, the time is the sum of CPU
        and network time (hpc3d.predict.machine.between_hosts).
        """
        if len(members) == 1:
            return 0.0
        if self.cores and self.crossing(members):
            return sum(between_hosts.legs(self, op, nbytes, members))
        route = self._route(members)
        if op in route.tables:
            return route.tables[op](nbytes)
        if self.protocols and op in RING_OPS:
            return fastest(self.protocols, op, nbytes, route[:2], route.beta)
        beta = route.spread if op == "all_to_all" else route.beta
        seconds = best(op, route.members, nbytes, route.alpha, beta, route.hop)
        if op == "all_reduce" and route.levels:
            seconds = min(seconds, hierarchical_all_reduce(nbytes, *route.levels))
        return self.launch_s + seconds

    def crossing(self, members: Sequence[int]) -> Crossing | None:
        """Return the Crossing that describes a group (hpc3d.predict.machine.between_hosts).

        The result is `None` if all members are on one node.
        """
        return self._crossing(members if isinstance(members, range) else tuple(members))

    @cached_property
    def _crossing(self) -> Callable[[Sequence[int]], Crossing | None]:
        return cache(partial(between_hosts.crossing, self))

    @cached_property
    def known(self) -> dict[tuple, Any]:
        """Costs of products and calls that simulations on this machine have computed before."""
        return {}

    @cached_property
    def anywhere(self) -> dict[tuple[str, int], Callable[[float], float]]:
        """Maps (operation, number of members) to a function from bytes to seconds.

        The function interpolates the measured table that applies to any stride (stride 0).
        """
        return {
            (each.op, each.members): each.time
            for groups in ("alone", "at once")
            for each in self.measured
            if not each.stride and each.groups == groups
        }

    @cached_property
    def _route(self) -> Callable[[Sequence[int]], Route]:
        return cache(self.route)

    def route(self, members: tuple[int, ...]) -> Route:
        """Return the Route of a group of two or more ranks that are evenly distributed over the
        nodes."""
        (nodes, here), ranks = self.nodes(members), self.ranks_per_node
        near, far = self.link(here), self.link(members)
        inside = Level(len(here), near.alpha_s, near.beta(1, ranks, max(1, len(here) - 1)))
        up = uplink_cost(self, members)
        across = Level(nodes, far.alpha_s, far.beta(1, ranks))
        hindered = near.node_bandwidth or far.node_bandwidth
        alone_serves = not up.beta and (inside.members == ranks or not hindered)
        tables = self.tables(members, alone_serves)
        if 1 in (inside.members, across.members):
            _, alpha, beta = inside if across.members == 1 else across
            beta, spread = max(beta, up.beta), max(beta, up.spread)
            return Route(len(members), across.members, alpha, alpha, beta, spread, None, tables)
        leaving = UplinkCost(max(far.beta(len(here), ranks), up.beta), up.spread)
        # Each member of a node runs its own ring across the nodes in a hierarchical all-reduce.
        rings = across._replace(beta=max(across.beta, len(here) * up.beta))
        return _over_nodes(len(members), inside, rings, leaving, tables)

    def nodes(self, members: Sequence[int], ranks_per_node: int = 0) -> tuple[int, Sequence[int]]:
        """Return the number of nodes that a group spans, and the members on the fullest of them.

        Members with a constant stride are distributed periodically over the nodes, so only the
        first ones are visited. A nonzero `ranks_per_node` overrides the value of the machine.
        """
        ranks, count = ranks_per_node or self.ranks_per_node, 0
        if isinstance(members, range) and len(members) > 3 * ranks:
            if members.step >= ranks:
                return len(members), members[:1]
            count = members[-1] // ranks - members[0] // ranks + 1
            # A node repeats the pattern of the node that is `step` nodes before it.
            members = members[: (members.step + 2) * ranks // members.step + 1]
        nodes = defaultdict(list)
        for rank in members:
            nodes[rank // ranks].append(rank)
        return count or len(nodes), max(nodes.values(), key=len)

    def link(self, members: Sequence[int]) -> Link:
        """Return the innermost link that connects the members."""
        ends = members[:: max(1, len(members) - 1)] if isinstance(members, range) else members
        low, high = min(ends), max(ends)
        joins = (not link.ranks or low // link.ranks == high // link.ranks for link in self.links)
        return next(compress(self.links, joins))

    def tables(
        self, members: Sequence[int], alone_serves: bool
    ) -> dict[str, Callable[[float], float]]:
        """Return the measured times that apply to a group.

        The result maps each operation to a function from bytes to seconds. Tables measured "at
        once" take precedence. Tables measured "alone" are used only if `alone_serves` is true
        (because the group shares no link with other groups). Tables with stride 0 are used only
        for groups on one node.
        """
        across = self.nodes(members)[0] > 1
        strides = {members.step} if isinstance(members, range) else _strides(members)
        found = {}
        for groups in ("alone", "at once") if alone_serves else ("at once",):
            for table in self.measured:
                fits = {table.stride} == strides if table.stride else not across
                if fits and (table.members, table.groups) == (len(members), groups):
                    found[table.op] = table.time
        return found


def _strides(members: Sequence[int]) -> set[int]:
    return {there - here for here, there in pairwise(sorted(members))}
