"""Lower bounds on step times, from compute, communication volume and pipeline bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import lcm, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.comm.mesh import CONTEXT, EXPERTS, data_axes, expert_data_axes, plane
from hpc3d.config.cuboid import received_elements
from hpc3d.config.input_file import Config, MeshConfig
from hpc3d.model.families import block_products, family_of
from hpc3d.ops.float8 import E4M3
from hpc3d.predict.machine.between_hosts import legs
from hpc3d.predict.planning.contexts import (
    attention_flops,
    exchange_words,
    mean_hops,
    ring_words,
)
from hpc3d.predict.planning.pass_costs import LayerSample, replicas_of
from hpc3d.predict.simulation.simulator import ranks_per_core
from hpc3d.tensor.split import SCHEMES

if TYPE_CHECKING:
    from hpc3d.config.input_file import ModelConfig
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.pass_costs import PartCosts

_KINDS = {
    "1d": "1-D",
    "1d-sequence": "1-D",
    "2d": "2-D",
    "2d-summa": "2-D",
    "2.5d": "2.5-D",
    "3d": "3-D",
    "3d-broadcast": "3-D",
}
# Number of candidates on a short list. Candidates with a new kind of tensor parallelism are added
# even if the list is full.
_SHORT = 2
# Factor that turns an estimated compute or communication time into a lower bound.
_BOUND_MARGIN = 0.7


class Candidate(NamedTuple):
    """Layout whose schedule and memory options have not been chosen yet.

    `moves` maps each axis to its communication time per step. `work` is the CPU time of all
    communication, and `hidden` is the part of the communication time that can overlap with
    compute. All times are in seconds.
    """

    config: Config
    moves: dict
    work: float
    hidden: float = 0.0

    @property
    def kind(self) -> str:
        return kind(self.config)


def kind(config: Config) -> str:
    """Return the kind of tensor parallelism that a layout uses, such as "2-D", or "none".

    For a split that is not published, it is the name of its scheme, or "parallel.split".
    """
    if config.mesh.tensor_ranks() == 1:
        return "none"
    if config.parallel.split is None:
        return _KINDS[config.parallel.scheme]
    names = (name for name, split in SCHEMES.items() if split == config.tensor_split)
    return next(names, config.parallel.way)


def shortlists(candidates: Sequence[Candidate]) -> tuple[list[list[Candidate]], list[Candidate]]:
    """Return short lists of candidates to estimate first, and a list of all other candidates.

    Each combination of p, d, c and e has a short list. The candidates are processed in order. Each
    is added to its short list if the list has fewer than _SHORT entries or has no entry yet with
    the same kind of tensor parallelism.
    """
    groups, others = {}, []
    for candidate in candidates:
        mesh = candidate.config.mesh
        group = groups.setdefault((mesh.p, mesh.d, mesh.c, mesh.e), [])
        known = candidate.kind in (each.kind for each in group)
        (others if known and len(group) >= _SHORT else group).append(candidate)
    return [*groups.values()], others


def _product_type(config: Config, machine: Machine) -> str:
    """Return the dtype of the fastest matrix products in a run: FP8 if enabled, or
    `train.dtype`."""
    train = config.train
    asked = (train.backend, train.product_dtype, train.product_scale)
    coded = asked == ("cupy", "float8", "tensor") and E4M3 in machine.gemm
    return E4M3 if coded else train.dtype


class Bounds:
    """Lower bounds on the step times of layouts, from compute, bubble and communication.

    If the input asks for a CUDA graph, all layouts are assumed to have one.
    """

    def __init__(self, config: Config, ranks: int, vocabulary: int, machine: Machine) -> None:
        machine = machine.captured if config.train.cuda_graph else machine
        self.machine, self.ranks, self.layers = machine, ranks, config.model.layers
        model, rows = config.model, config.train.batch * config.model.sequence
        computed = sum(count * each.computed for count, each in block_products(model))
        columns = int(computed) // (model.layers * model.hidden)  # one GEMM with a layer's FLOPs
        whole = machine.product(rows, columns, model.hidden, _product_type(config, machine))
        self.ranks_per_core = ranks_per_core(machine, ranks)
        self.ideal, self.fixed = 3 * whole * model.layers / ranks, 0.0
        sample = LayerSample(_smallest(config), vocabulary, machine, ())
        passes, _ = sample.layer_passes(1, halves=False)
        self.launches = passes.forward.seconds + passes.whole.seconds
        self.placed = ranks > 1 and self.near(1) < self.near(ranks - 1)

    def near(self, stride: int) -> float:
        return self.machine.call("all_gather", 1e6, (0, stride))

    def candidate(self, config: Config) -> Candidate:
        """Return a Candidate for a layout.

        The axes are reordered by communication volume, with the largest volume on the innermost
        axis, if this order shortens the communication time.
        """
        volume = volumes(config)
        candidate = self.moves(config, volume)
        if self.placed and (order := _heaviest_last(config, volume)) != config.mesh.order:
            turned = self.moves(replace(config, mesh=replace(config.mesh, order=order)), volume)
            if sum(turned.moves.values()) < sum(candidate.moves.values()):
                return turned
        return candidate

    def calibrate(self, config: Config, parts: PartCosts, fixed: float) -> None:
        """Tighten the bounds with the measured costs of a microbatch.

        `fixed` is an additional time per step, in seconds, which is the same for all layouts.
        """
        micros = config.parallel.microbatches * self.layers / config.mesh.p
        layer = parts.layer.forward + parts.layer.whole
        computed = micros * (layer.seconds - layer.waits.total() - self.launches)
        self.ideal, self.fixed = max(self.ideal, _BOUND_MARGIN * computed), fixed

    def least(self, candidate: Candidate) -> float:
        """Return a lower bound on the step time in seconds.

        The bound is the compute and bubble time at the best number of microbatches, plus the
        communication time that cannot be hidden. The gathers of weights are hidden by compute if
        weights are prefetched, which `plan` decides later; SUMMA cannot prefetch panels. If ranks
        share a core, the bound is at least the total CPU time of the ranks on the core.
        """
        stages, micros, found = candidate.config.mesh.p, 1, []
        chunks = max(1, self.layers // stages)
        while micros <= candidate.config.train.batch:
            busy = self.ideal + micros * self.launches * self.layers / stages
            found.append(busy * (1 + (stages - 1) / (micros * chunks)))
            micros *= 2
        config, busy = candidate.config, min(found)
        hides = "xyz" if config.parallel.chunked_products > 1 else ""
        moves = {axis: spent for axis, spent in candidate.moves.items() if axis not in hides}
        gathered = {*config.splits["dense"].m.split()} & {*"xyz"} - {*_panel_axes(config)}
        weights = sum(moves.get(axis, 0.0) for axis in gathered)
        if config.parallel.prefetch:  # half of the bytes over the replicas are updated values
            weights += replicas_of(config, moves).total() / 2
        words = sum(moves.values()) - weights - candidate.hidden
        alone = busy + _BOUND_MARGIN * (words + max(0.0, weights - busy))
        busy = self.ideal + self.launches * self.layers / stages + _BOUND_MARGIN * candidate.work
        return self.fixed + max(
            alone, self.ranks_per_core * busy if self.ranks_per_core > 1 else 0.0
        )

    def shown_context(self, candidate: Candidate) -> float:
        """Return the approximate exposed communication time along axis c, in seconds.

        Ring messages overlap with attention, which is assumed to run at the peak rate. The slowest
        message of a hop determines the time of the hop.
        """
        config, shown = candidate.config, 0.0
        members, heads = config.grid().ranks_along(CONTEXT, {}), config.context().heads
        layers = config.model.layers / config.mesh.p
        if heads > 1:
            group = "all_to_all", 4 * layers, members[:heads]
            shown += self._seconds(config, group, exchange_words(config))
        if messages := 3 * layers * mean_hops(config):
            pairs = zip(members, [*members[heads:], *members[:heads]])
            slowest = max(pairs, key=lambda pair: self.machine.call("send", 1e6, pair))
            ring = self._seconds(config, ("send", messages, slowest), ring_words(config))
            busy = attention_flops(config) / self.machine.gemm[config.train.dtype].peak
            shown += ring if self.machine.cores else max(0.0, ring - busy)
        return shown

    def _seconds(self, config, calls, elements):
        """Return the total time of `calls`: an operation, a number of calls, and their ranks."""
        op, times, members = calls
        nbytes = elements * np.dtype(config.train.dtype).itemsize / times
        return times * sum(legs(self.machine, op, nbytes, members))

    def moves(self, config: Config, volume: Mapping[str, float]) -> Candidate:
        """Return a Candidate for a layout with the given communication `volume` by axis.

        A layer is assumed to have four matrix products, each of which makes two communication
        calls along the tensor axes. With SUMMA, each product makes three calls per panel: X (or
        W) is broadcast in the forward and in the backward pass, and dX (or dW) is reduced.
        """
        itemsize = np.dtype(config.train.dtype).itemsize
        found, work = {}, 0.0
        for axis, count in volume.items():
            op, times, members = _calls(config, axis)
            nbytes = count * itemsize / times
            if axis in _panel_axes(config):  # a member receives only the panels of other members
                nbytes *= len(members) / (len(members) - 1)
            each = legs(self.machine, op, nbytes, members)
            found[axis], work = times * sum(each), work + times * each.work
        hidden = 0.0
        if CONTEXT in found and not self.machine.cores:
            hidden = found[CONTEXT] * ring_words(config) / volume[CONTEXT]
        return Candidate(config, found, work, hidden)


def _panel_axes(config: Config) -> tuple[str, ...]:
    """Return the axes along which SUMMA broadcasts panels of X and of W, or () without panels."""
    split = config.tensor_split
    return (split.panels, *split.w[0][:1]) if split.panels else ()


def _calls(config: Config, axis: str) -> tuple[str, float, Sequence[int]]:
    """Return the communication along an axis: operation, calls per step, and ranks of one
    group."""
    grid, layers = config.grid(), config.model.layers / config.mesh.p
    single = axis in grid.sizes
    members = grid.ranks_along(axis, {}) if single else grid.ranks_over(axis.split(), {})
    if axis == "p":
        return "send", 1, members[:2]
    if axis == CONTEXT:
        rings, heads = config.context()[1:]
        if rings == 1:
            return "all_to_all", 4 * layers, members
        calls = layers * (3 * mean_hops(config) + 4 * (heads > 1))
        return "send", calls, (members[0], members[heads])
    if axis == EXPERTS:
        return "all_to_all", 4 * layers / config.model.moe_every, members
    if axis not in "xyz":
        return "all_gather", 1, members
    along = _panel_axes(config)
    if axis in along:
        panels = lcm(*(config.mesh.sizes()[each] for each in along))
        return "broadcast", 12 * layers * panels, members
    op = "broadcast" if axis in config.tensor_split.own.split() else "all_gather"
    return op, 8 * layers, members


def _smallest(config: Config) -> Config:
    """Return a one-layer, single-rank configuration whose time is dominated by kernel launches."""
    sizes: Any = {"kv_heads": None, "head_dim": None, "ffn": None}
    sizes |= {"rope_fraction": 1.0, "rope_scaling": None}  # a head has one feature
    model = replace(config.model, layers=1, hidden=1, heads=1, sequence=1, **sizes)
    mesh = MeshConfig(x=1, y=1, z=1)
    return replace(config, model=model, mesh=mesh, train=replace(config.train, batch=1))


def volumes(config: Config) -> Counter[str]:
    """Return the number of elements that a rank receives per step along each mesh axis.

    Axes with one rank are omitted. The number of microbatches is assumed to equal the number of
    stages, and weights are gathered for every microbatch.
    """
    mesh, model, train = config.mesh, config.model, config.train
    tensor, layers = mesh.tensor_ranks(), model.layers / mesh.p
    copies, replicas = mesh.replicas(), tensor_replicas(config, "m")
    owned, panels = config.tensor_split.own.split(), _panel_axes(config)
    one = replace(config, train=replace(train, batch=train.batch / (copies * mesh.p)))
    found: Counter[str] = Counter()
    for axis in (axis for axis in "xyz" if getattr(mesh, axis) > 1):
        size, shards = getattr(mesh, axis), tensor
        if axis in config.splits["dense"].m:  # weights are communicated along this axis
            shards //= prod(replicas[other] for other in replicas if other != axis)
        alone = dict.fromkeys(config.sizes(), 1) | {axis: size}
        times = (3 if axis in panels else 2) * mesh.p * layers
        received = times * received_elements(one, mesh.e, alone) * size / shards
        found[axis] = received * (size / (size - 1) if axis in owned else 1)  # of ranks not owners
    for axes, elements in summed(config):
        ranks = prod(config.sizes()[axis] for axis in axes)
        stored = elements * prod(replicas.values()) / (mesh.p * tensor)
        found[plane(axes)] += 2 * (1 - 1 / ranks) * stored * _gradient_share(config)
    if mesh.c > 1:
        found[CONTEXT] = ring_words(config) + exchange_words(config)
    if mesh.e > 1:
        found[EXPERTS] = _slot_words(config)
    if mesh.p > 1:
        elements = train.batch * model.sequence * model.hidden / (copies * tensor)
        found["p"] = 2 * elements * prod(tensor_replicas(config, "n").values())
    return +found


def _gradient_share(config: Config) -> float:
    """Return a lower bound on the bytes of a reduced gradient, relative to `train.dtype`.

    The bytes of a compressed gradient are neglected.
    """
    if config.parallel.compression != "none":
        return 0.0
    kept = np.dtype(config.train.dtype).itemsize
    return min(1.0, np.dtype(config.parallel.reduce_dtype or config.train.dtype).itemsize / kept)


def tensor_replicas(config: Config, loop: str) -> dict[str, int]:
    """Return the sizes of the tensor axes along which `loop` is sharded, but not its blocks.

    `loop` is a dimension of the matrix product Y[m, n] = X[m, k] W[k, n]. If `loop` is m, the
    blocks of W are replicated along these axes (as along z in the 2.5-D scheme), or one rank
    stores them; if `loop` is n, the blocks of X.
    """
    split, sizes = config.splits["dense"], config.sizes()
    full = {*split.replicate.split(), *split.own.split()}
    axes = full.intersection(getattr(split, loop).split(), "xyz")
    return {axis: sizes[axis] for axis in axes}


def summed(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """Return pairs (axes, number of weights whose gradients are reduced over these axes).

    The first pair is for dense layers, and the second pair for experts.
    """
    sizes, (dense, experts) = config.sizes(), _weights(config.model, config.mesh.e)
    return [(data_axes(sizes), dense), (expert_data_axes(sizes), experts)]


@cache
def _weights(model: ModelConfig, e: int) -> tuple[int, float]:
    """Return the numbers of weights of dense layers, and of the experts of a rank of axis e."""
    dense, experts = 0, 0.0
    for count, each in block_products(model):
        if each.experts > 1:
            experts += count * each.weights / e
        else:
            dense += count * each.weights
    return dense, experts


def _slot_words(config: Config) -> float:
    """Return the number of elements that a rank receives per step along axis e.

    A mixture-of-experts layer communicates 4 (1 - 1/e) E C S h elements, divided by the sizes of
    the other axes, for E experts, S sequences and hidden size h. C is the capacity for the tokens
    of a sequence that a rank of axis c stores.
    """
    model, mesh = config.model, config.mesh
    experts = family_of(model).sizes(model, model.vocabulary).experts
    assert experts
    tokens = config.train.batch * model.sequence / mesh.replicas()
    slots = experts.slots_of_token(model.sequence // mesh.c) * tokens
    words = slots * model.hidden / (mesh.p * mesh.tensor_ranks())
    return 4 * (1 - 1 / mesh.e) * words * (model.layers // experts.every)


def _heaviest_last(config: Config, volume: Mapping[str, float]) -> str:
    """Return the axes of a layout, ordered by communication volume, the largest one innermost."""
    order, words = config.mesh.order.split(), Counter()
    for group, count in volume.items():
        words.update(dict.fromkeys(group.split(), count))
    slots = [index for index, axis in enumerate(order) if axis in words]
    for index, axis in zip(slots, sorted((order[slot] for slot in slots), key=words.get)):
        order[index] = axis
    return " ".join(order)
