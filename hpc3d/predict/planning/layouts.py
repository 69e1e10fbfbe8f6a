"""Enumerate the layouts of a model: all meshes, and the options for each mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from math import factorial, gcd, prod
from typing import Any, NamedTuple

from hpc3d.comm.grid import divisors
from hpc3d.comm.mesh import data_axes
from hpc3d.config.cuboid import cuboids
from hpc3d.config.input_file import Config, MeshConfig, ParallelConfig
from hpc3d.config.limits import MOST_PASSES
from hpc3d.config.parallel_rules import wrong_compression, wrong_context, wrong_experts
from hpc3d.config.pipeline_rules import wrong_pipeline
from hpc3d.config.size_rules import sequence_divisor, violations, wrong_parts
from hpc3d.pipeline.schedule import SCHEDULES, usual
from hpc3d.predict.planning.contexts import contexts, may_cut, with_context
from hpc3d.tensor.split import LOOPS, PUBLISHED, SCHEMES, STORAGE, Split


class MemoryOption(NamedTuple):
    """Settings in `[parallel]` that save memory at the cost of recomputation or communication.

    If `attention` is `None`, `parallel.attention` keeps its default value.
    """

    keep_gathered: bool
    recompute: str | tuple[str, ...]
    attention: str | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig) -> MemoryOption:
        """Return the memory option of a layout."""
        return cls(parallel.keep_gathered, parallel.recompute, parallel.attention)


def _options(*ways: tuple[Any, ...]) -> tuple[MemoryOption, ...]:
    return tuple(MemoryOption(keep, *way) for way in ways for keep in (True, False))


# Values of parallel.recompute in order of increasing recomputation: the attention probabilities,
# the outputs of norms and activation functions, the up projection, and the complete block.
_CHEAP, _PRODUCTS = ("layernorm", "mlp_act"), ("layernorm", "mlp")
RECOMPUTE: tuple[Any, ...] = (
    "none",
    "selective",
    ("core_attn", *_CHEAP),
    ("core_attn", *_PRODUCTS),
    "full",
)
# Chunked and fused attention save no probabilities, so "core_attn" saves next to nothing.
_NO_SCORES: tuple[Any, ...] = "none", "none", _CHEAP, _PRODUCTS, "full"
# Options in order of increasing step time. Chunked attention recomputes the probabilities, as
# "core_attn" does. On CPUs, chunked attention is not slower than "core_attn" and needs less
# memory. On GPUs without fused attention, chunked attention launches far more kernels.
MEMORY_OPTIONS = _options(*zip(RECOMPUTE))
WITHOUT_SCORES = _options(*zip(_NO_SCORES[1:]))
_CHUNKED = _options(*((each, "chunked") for each in _NO_SCORES[1:]))
WITH_CHUNKS = {"numpy": (*_options(("none",)), *_CHUNKED), "cupy": (*MEMORY_OPTIONS, *_CHUNKED)}
_DEFAULT = ParallelConfig().scheme
_ZEROS = ((0, 1), (2,), (3,))  # in ascending order of communication per pass
_SHARDED = 3  # ZeRO stage that shards the weights


def recomputation(recompute: str | tuple[str, ...]) -> int:
    """Return the index in RECOMPUTE of a value, or of the value that also lists "core_attn"."""
    return (RECOMPUTE if recompute in RECOMPUTE else _NO_SCORES).index(recompute)


def meshes(
    ranks: int, layers: int, batch: int, schemes: Mapping[str, Split] = SCHEMES
) -> Iterator[tuple[int, int, str, int, int, int]]:
    """Yield each distinct mesh (p, d, scheme, x, y, z) for a number of ranks.

    Only one of several equivalent meshes is included: the 3-D scheme with z = 1 is equivalent to
    2-D, and with x = z = 1 to 1-D with sequence parallelism.
    """
    tensor = partial(_tensor_meshes, tuple(schemes.items()))
    for p in (p for p in divisors(ranks) if p <= layers):
        for d in (d for d in divisors(ranks // p) if batch % d == 0):
            yield from ((p, d, *mesh) for mesh in tensor(ranks // (p * d)))


@cache
def _tensor_meshes(
    schemes: tuple[tuple[str, Split], ...], ranks: int
) -> list[tuple[str, int, int, int]]:
    """Return each distinct mesh (scheme, x, y, z) for a number of tensor-parallel ranks.

    Of equivalent meshes, one that uses all axes of its scheme is preferred, then the default
    scheme. A mesh is omitted if its scheme does not use an axis, or uses axes only for data
    parallelism.
    """
    found: dict[tuple, tuple] = {}
    for mesh in cuboids(ranks):
        sizes = {axis: size for axis, size in zip("xyz", mesh, strict=True) if size > 1}
        for name, split in schemes:
            axes = {axis for loop in LOOPS for axis in getattr(split, loop).split()}
            copies = {*split.m.split()} & {*split.replicate.split()}
            if sizes.keys() <= axes and not (sizes and sizes.keys() <= copies):
                form, rank = _form(split, sizes), (axes != sizes.keys(), name != _DEFAULT)
                if form not in found or rank < found[form][0]:
                    found[form] = rank, (name, *mesh)
    return [mesh for _, mesh in found.values()]


def _form(split: Split, sizes: Mapping[str, int]) -> tuple:
    """Return a key that is equal for equivalent schemes on meshes of the given sizes.

    It contains the axes with several ranks in each field of the split, numbered in order of their
    first appearance, and the sizes of these axes.
    """
    fields = [
        [axis for axis in getattr(split, key).split() if axis in sizes] for key in LOOPS + STORAGE
    ]
    order = [*dict.fromkeys(chain(*fields))]
    numbers = (tuple(map(order.index, axes)) for axes in fields)
    return (*numbers, *(sizes[axis] for axis in order))


def bare(config: Config) -> Config:
    """Return `config` with default values for the mesh sizes and all keys that depend on them."""
    order, transport = config.mesh.order, config.mesh.transport
    parallel = replace(
        config.parallel,
        scheme=_DEFAULT,
        split=None,
        zero=0,
        shard=0,
        microbatches=1,
        chunks=1,
        layers_per_stage=None,
        context="ring",
        ulysses=1,
        attention=None,
        recompute="none",
        keep_gathered=True,
        schedule="none",
        overlap_experts=False,
    )
    return replace(config, mesh=MeshConfig(order=order, transport=transport), parallel=parallel)


def with_mesh(
    config: Config,
    mesh: tuple[int, int, str, int, int, int],
    schemes: Mapping[str, Split] = SCHEMES,
) -> Config:
    """Return `config` with the mesh sizes and the scheme of a result of `meshes`.

    A scheme that input files do not know by name becomes the key parallel.split.
    """
    p, _, name, *_ = mesh
    return _with_sizes(config, mesh, _with_scheme(config.parallel, name, p, schemes))


def _with_sizes(config: Config, mesh: tuple, parallel: ParallelConfig) -> Config:
    p, d, _, x, y, z = mesh
    sized = replace(config.mesh, p=p, d=d, x=x, y=y, z=z)
    return replace(config, mesh=sized, parallel=parallel)


def _with_scheme(
    parallel: ParallelConfig, name: str, p: int, schemes: Mapping[str, Split]
) -> ParallelConfig:
    way: dict[str, Any] = {"scheme": name, "split": None}
    if name not in PUBLISHED:
        used = {key: axes for key in LOOPS + STORAGE if (axes := getattr(schemes[name], key))}
        way = {"scheme": _DEFAULT, "split": used}
    return replace(parallel, **way, schedule=usual(p))


def every_mesh(
    base: Config, ranks: int, memory: float, schemes: Mapping[str, Split] = SCHEMES
) -> Iterator[list[Config]]:
    """For each mesh, yield a list of valid layouts, one per kind of context parallelism.

    The list may be empty, and invalid meshes may be omitted. The layouts have ZeRO 0, or ZeRO 3 if
    the mesh is invalid with lower stages: the last shards of ZeRO 3 are padded.
    """
    layers, batch = base.model.layers, base.train.batch

    @cache
    def parallel(name, p):
        return _with_scheme(base.parallel, name, p, schemes)

    @cache
    def divides(name, x, y, z):
        return _divides(replace(base, parallel=parallel(name, 1)), ranks, (name, x, y, z))

    for c, e in product(divisors(ranks), divisors(gcd(base.model.experts or 1, ranks))):
        if ranks % (c * e):
            continue
        shared = replace(base, mesh=replace(base.mesh, e=e))
        for mesh in meshes(ranks // (c * e), layers, batch, schemes):
            if not divides(*mesh[2:]):  # then no mesh with these tensor axes does
                continue
            config = _with_sizes(shared, mesh, parallel(mesh[2], mesh[0]))
            if c > 1 and not may_cut(config, c, memory):
                continue
            found = _valid(config, c, ranks)
            if not found and mesh[1] * c * e > 1:
                found = _valid(_with_zero(config, _SHARDED), c, ranks)
            yield found


def _divides(base: Config, ranks: int, tensor: tuple[str, int, int, int]) -> bool:
    """Return True if a mesh with these tensor axes may be valid, with one or several replicas.

    With ZeRO 3, the rules do not depend on the number of replicas, so the fewest are tried.
    """
    count = prod(tensor[1:])
    for d in divisors(gcd(base.train.batch, ranks // count))[:2]:
        config = _with_sizes(base, (1, d, *tensor), base.parallel)
        if not violations(config if d == 1 else _with_zero(config, _SHARDED), d * count):
            return True
    return False


def _valid(config: Config, c: int, ranks: int) -> list[Config]:
    """Return the valid layouts with `c` context-parallel ranks, one per kind of parallelism."""
    if c > 1:
        return [*_cut(config, c, ranks)]
    return [] if problems(config, ranks) else [config]


def _cut(config: Config, c: int, ranks: int) -> Iterator[Config]:
    ring = with_context(config, c, "ring", 1)
    if [*wrong_parts(ring), *wrong_experts(ring), *wrong_pipeline(ring), *violations(ring, ranks)]:
        return  # if "ring" is invalid, the other kinds of context parallelism are too
    for context, ulysses in contexts(c):
        cut = with_context(config, c, context, ulysses)
        if not [*wrong_context(cut)] and (cut == ring or not violations(cut, ranks)):
            yield cut


def problems(config: Config, ranks: int) -> list[str]:
    """Return an error message for each rule that a layout violates."""
    parts = *wrong_parts(config), *wrong_pipeline(config), *wrong_experts(config)
    return [*wrong_context(config), *parts, *violations(config, ranks)]


@cache
def schedules(stages: int, micros: int, layers: int) -> tuple[tuple[str, int], ...]:
    """Return a pair (name, chunks) for each schedule that supports the given sizes.

    Schedules that split the backward pass come last, and lean schedules last among these. Pairs
    are otherwise sorted by name.
    """
    if stages == 1:
        return ((usual(stages), 1),)
    most = min(layers // stages, MOST_PASSES // (stages * micros))  # maximum number of chunks
    named = [
        (schedule.splits_backward, schedule.lean, name, chunks)
        for name, schedule in SCHEDULES.items()
        for chunks in schedule.search_chunks
        if chunks <= most
        and not schedule.asynchronous
        and not schedule.forbids(stages, micros, chunks)
    ]
    return tuple((name, chunks) for *_, name, chunks in sorted(named))


def zeros(config: Config, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the valid ZeRO stages of a layout, grouped by their communication per pass.

    The layout must be valid with its own ZeRO stage.
    """
    sizes = config.sizes()
    if prod(sizes[axis] for axis in data_axes(sizes)) == 1:
        return ((0,),)
    known = config.parallel.zero
    return tuple(
        each for each in _ZEROS if known in each or _allows(_with_zero(config, each[0]), ranks)
    )


def _allows(config: Config, ranks: int) -> bool:
    rules = chain(wrong_compression(config), wrong_pipeline(config))
    return not any(rules) and not violations(config, ranks)


def _with_zero(config: Config, zero: int) -> Config:
    return replace(config, parallel=replace(config.parallel, zero=zero))


def orders(config: Config) -> int:
    """Return the number of ways to order the mesh axes that have more than one rank."""
    return factorial(sum(size > 1 for size in config.sizes().values()))


@cache
def microbatches(config: Config, ranks: int) -> tuple[int, ...]:
    """Return the valid numbers of microbatches in ascending order.

    The number of sequences per microbatch must be divisible by the sizes of the axes that shard
    the batch, so the largest valid number of microbatches is a multiple of all others.
    """
    allowed = divisors(config.train.batch // sequence_divisor(config))
    for most in reversed([size for size in allowed if size * config.mesh.p <= MOST_PASSES]):
        parallel = replace(config.parallel, microbatches=most)
        if not violations(replace(config, parallel=parallel), ranks):
            return tuple(divisors(most))
    return ()
