"""Every rule about sizes, once, and the mesh that a file leaves open: the best cuboid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf, isqrt, prod
from typing import TYPE_CHECKING

from hpc3d import limits
from hpc3d.comm.mesh import CONTEXT
from hpc3d.config.backend_rules import wrong_backend
from hpc3d.config.context_rules import unexchanged_heads, wrong_context
from hpc3d.config.evaluation_rules import wrong_evaluation
from hpc3d.config.input_file import AXES, ModelConfig, TrainConfig
from hpc3d.config.load import flat
from hpc3d.model.families import FAMILIES, block_products, family_of, with_epsilon
from hpc3d.pipeline.schedule import find, usual
from hpc3d.plain import Problems
from hpc3d.tensor.split import LOOPS, STORAGE, misplaced

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.schedule import Schedule

_MOST_PASSES = 50_000  # of a schedule that is laid out for all steps of a run


def resolve(config: Config, ranks: int, default: bool = False) -> Config:
    """`config` with its mesh settled for `ranks`; a `default` model may grow to fit them.

    Raises ValueError with one line for every rule that is broken, each with key and remedy.
    """
    refuse([*unknown_values(config), *not_there_yet(config)])
    config = _with_schedule(config)
    refuse([*wrong_context(config), *wrong_parts(config), *wrong_pipeline(config)])
    if default and (config.model, config.train.batch) == (ModelConfig(), TrainConfig().batch):
        config = _enlarged_default(config, ranks)
    config = _with_cuboid(config, ranks)
    refuse(violations(config, ranks))
    return replace(config, model=with_epsilon(config.model))


def refuse(problems: Sequence[str]) -> None:
    if problems:
        raise Problems(problems)


def _with_schedule(config: Config) -> Config:
    """`config` with its schedule and the number of chunks settled."""
    name = config.parallel.schedule or usual(config.mesh.p)
    wanted = find(name).chunks or 2
    chunks = wanted if config.parallel.chunks is None else config.parallel.chunks
    return replace(config, parallel=replace(config.parallel, schedule=name, chunks=chunks))


def violations(config: Config, ranks: int) -> list[str]:
    return [*_wrong_ranks(config, ranks), *_wrong_sizes(config)]


def unknown_values(config: Config) -> Iterator[str]:
    """Numbers out of range, names that do not exist, or not here."""
    yield from limits.out_of_bounds(config)
    yield from _out_of_range(config)
    yield from _wrong_family(config.model)
    yield from wrong_backend(config)
    yield from _wrong_decay(config.train)
    yield from wrong_evaluation(config)
    if not re.fullmatch(r"[\w .+-]+", config.name):
        yield f"name = {config.name!r}: names a folder; use letters, digits and . _ + - only"
    yield from _not_of_names(config)
    order = config.mesh.order
    if sorted(order.split()) != sorted(AXES):
        yield f"mesh.order = {order!r:.60}: must name each of {' '.join(AXES)} once"
    yield from _unknown_letters(config.parallel.split or {})


def _not_of_names(config: Config) -> Iterator[str]:
    """Texts with the one character that no file can have in its name."""
    for key, value in flat(config).items():
        if isinstance(value, str) and "\0" in value:
            yield f"{key} = {value!r}: holds a NUL character; take it out"


def _out_of_range(config: Config) -> Iterator[str]:
    model, train = config.model, config.train
    ranges = {
        "seed": (config.seed, 0, 2**64),
        "parallel.bucket_mb": (config.parallel.bucket_mb, 0, inf),
        "model.dropout": (model.dropout, 0, 1),
        "model.norm_epsilon": (with_epsilon(model).norm_epsilon, 0, 1),
        "model.rope_theta": (model.rope_theta, 1, inf),
        "train.learning_rate": (train.learning_rate, 0, inf),
        "train.weight_decay": (train.weight_decay, 0, inf),
        "train.clip": (train.clip, 0, inf),
        "train.max_minutes": (train.max_minutes, 0, inf),
        "guard.loss_spike_sigma": (config.guard.loss_spike_sigma, 0, inf),
        "run.watchdog_s": (config.run.watchdog_s, 0.1, 1e9),
    }
    for key, (value, lowest, limit) in ranges.items():
        if not lowest <= value < limit:
            found = limits.shown(value)
            yield f"{key} = {found}: must be at least {lowest} and below {limit}"


_SCALING = "factor", "low", "high", "original"


def _wrong_family(model: ModelConfig) -> Iterator[str]:
    """Keys of another family, and rotary positions that are not known."""
    usual, own = with_epsilon(ModelConfig(kind=model.kind)), family_of(model).keys
    model = with_epsilon(model)
    for key in dict.fromkeys(key for family in FAMILIES.values() for key in family.keys):
        if key not in own and (value := getattr(model, key)) != getattr(usual, key):
            kinds = " or ".join(kind for kind, family in FAMILIES.items() if key in family.keys)
            yield f"model.{key} = {value}: of model.kind = {kinds} alone; leave it out"
    scaling = model.rope_scaling
    if scaling is None:
        return
    if {*scaling} != {*_SCALING}:
        yield f"model.rope_scaling = {scaling}: must have {', '.join(_SCALING)} and nothing else"
    elif not (scaling["factor"] >= 1 and 0 < scaling["low"] < scaling["high"] < inf):
        yield f"model.rope_scaling = {scaling}: factor must be at least 1, and 0 < low < high"
    elif not 1 <= scaling["original"] < inf:
        yield f"model.rope_scaling = {scaling}: original must be a number of tokens"


def _wrong_decay(train: TrainConfig) -> Iterator[str]:
    if train.decay_steps is not None and 0 < train.decay_steps < train.warmup:
        yield (
            f"train.decay_steps = {train.decay_steps}: they begin with the warm-up; use at least "
            f"train.warmup = {train.warmup}"
        )


def _unknown_letters(letters: Mapping[str, str]) -> Iterator[str]:
    """Keys of parallel.split that are no part of a split, axes that do not exist or do not go
    together."""
    for key, axes in letters.items():
        if key not in LOOPS + STORAGE:
            yield f"parallel.split.{key}: unknown key; known here: {', '.join(LOOPS + STORAGE)}"
        for axis in sorted({*axes.split()} - {"x", "y", "z"}):
            yield f"parallel.split.{key}: no tensor axis {axis!r}; there are x, y and z"
    yield from misplaced(letters)


def not_there_yet(config: Config) -> Iterator[str]:
    """Values of the input format that this version does not run."""
    if config.torch.factory:
        name = f"torch.factory = {config.torch.factory!r:.80}"
        yield f"{name}: python -m hpc3d.partition run trains it"
    fixed = {
        "mesh.e": (config.mesh.e, 1),
    }
    for key, (value, only) in fixed.items():
        if value != only:
            yield f"{key} = {value!r}: not there yet; use {only!r}"


def _wrong_ranks(config: Config, ranks: int) -> Iterator[str]:
    sizes = config.mesh.sizes()
    total = config.mesh.grid().size
    if total != ranks:
        factors = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        yield (
            f"mesh: {factors or 'one rank'} = {total} ranks, but {ranks} were started: "
            f"change [mesh] or start {total}"
        )
    splits = config.splits().values()
    axes = " ".join(getattr(split, letter) for split in splits for letter in "mnk").split()
    for axis in ("x", "y", "z"):
        if sizes[axis] > 1 and axis not in axes:
            yield f"mesh.{axis} = {sizes[axis]}: the scheme does not split along {axis}; use 1"


def wrong_parts(config: Config) -> Iterator[str]:
    """Sizes that do not divide on any mesh."""
    yield from limits.too_large(config, block_products(config.model))
    model, sequences = config.model, config.train.batch
    micros = config.parallel.microbatches
    if model.hidden % model.heads:
        yield (
            f"model.hidden = {model.hidden} does not divide by model.heads = {model.heads}: "
            "change one of them"
        )
    elif family_of(model).rotary and model.hidden // model.heads % 2:
        yield (
            f"model.hidden / model.heads = {model.hidden // model.heads}: rotary positions turn "
            "pairs of features; use an even number"
        )
    if model.heads % (model.kv_heads or model.heads):
        yield (
            f"model.heads = {model.heads} does not divide by model.kv_heads = {model.kv_heads}: "
            "change one of them"
        )
    yield from wrong_tokens(model)
    yield from _wrong_head(config)
    if sequences % micros:
        yield (
            f"train.batch = {sequences} does not divide into parallel.microbatches = {micros}: "
            f"use a multiple of {micros}, or other parallel.microbatches"
        )


def wrong_tokens(model: ModelConfig) -> Iterator[str]:
    """A token for padding that is none of the text."""
    last = (model.vocabulary or inf) - 1
    if model.padding is not None and model.padding >= last:
        yield (
            f"model.padding = {model.padding}: must be below {last}, the last token of "
            "model.vocabulary, which stands for masked ones; name another, or raise it"
        )


def _alike(model: ModelConfig) -> bool:
    """Whether a product of the head is split so that Y lies as X does."""
    family = family_of(model)
    return any(each.alike for each in family.head(family.sizes(model, model.vocabulary or 0)))


def _wrong_head(config: Config) -> Iterator[str]:
    """Columns of X along several axes where a product of the head wants one."""
    split = config.splits()["dense"]
    if _alike(config.model) and len(split.x[1]) > 1:
        yield (
            f"parallel.split.k = {split.k}: a head of model.kind = {config.model.kind} takes one "
            "axis at most; put the others on m or n"
        )


def _wrong_sizes(config: Config) -> Iterator[str]:
    """Sizes of the model that do not divide over the axes that split them."""
    model, split = config.model, config.splits()["dense"]
    turned, outer = split.next(), split.without_panels()
    sequences, micros = config.train.batch, config.parallel.microbatches
    batch = "train.batch" if micros == 1 else "train.batch / parallel.microbatches"
    sizes = config.mesh.sizes()

    def used(*places):
        return {tuple(axis for axis in axes if sizes[axis] > 1) for axes in places}

    def without_context(places):
        return {tuple(axis for axis in axes if axis != CONTEXT) for axes in places}

    whole = used(split.y[0], outer.y[0])  # sequences, of attention and of the loss
    rows = sequences // micros * model.sequence
    inputs, outputs = (
        (split.of_gradient.w[0], turned.of_gradient.w[0]),
        (turned.w[1], outer.next().w[1]),
    )
    if _alike(model):
        alike = split.alike()
        inputs = *inputs, alike.w[0], alike.of_gradient.w[0]
    across = used(split.y[1], turned.x[1])
    needs = {
        (batch, sequences // micros): without_context(whole),
        (f"{batch} x model.sequence", rows): used(split.x[0], turned.y[0]) - whole,
        ("model.heads", model.heads): across,
        ("model.hidden", model.hidden): used(split.x[1], *inputs, *outputs),
    }
    if model.ffn is not None:
        ffn = used(split.of_gradient.w[1], split.w[1], turned.of_gradient.w[0], turned.w[0])
        needs["model.ffn", model.ffn] = across | ffn
    for (key, value), places in needs.items():
        for axes in sorted(places):
            yield from _indivisible(key, value, axes, sizes)
    for axes in sorted(across):
        yield from _unshared_keys(model, axes, sizes)
        yield from unexchanged_heads(config, prod(sizes[axis] for axis in axes))


def _unshared_keys(
    model: ModelConfig, axes: Iterable[str], sizes: Mapping[str, int]
) -> Iterator[str]:
    """Heads of keys that neither divide over the ranks that heads divide over, nor divide them."""
    count, keys = prod(sizes[axis] for axis in axes), model.kv_heads or model.heads
    if model.heads % count or keys % count == 0 or count % keys == 0:
        return
    fit = [n for n in divisors(model.heads) if n % count == 0 or count % n == 0]
    below, above = max(n for n in fit if n < keys), min(n for n in fit if n > keys)
    yield (
        f"model.kv_heads = {keys} neither divides over mesh axes {_named(axes, sizes)} = {count} "
        f"nor divides {count}: use {below} or {above}, or other [mesh] sizes"
    )


def wrong_pipeline(config: Config) -> Iterator[str]:
    """Schedules, parts of the model and data parallelism that do not go together."""
    parallel, layers, parts = config.parallel, config.model.layers, config.mesh.p
    parts *= parallel.chunks
    split = config.splits()["dense"]
    if parts > layers:
        chunks = f" x parallel.chunks = {parallel.chunks}" if parallel.chunks > 1 else ""
        yield (
            f"mesh.p = {config.mesh.p}{chunks}: {parts} parts, but model.layers = {layers}: "
            f"use at most {layers} parts or more layers"
        )
    elif parallel.layers_per_stage is not None:
        yield from _wrong_stages(parallel.layers_per_stage, parts, layers)
    schedule = find(parallel.schedule)
    problem = schedule.forbids(config.mesh.p, parallel.microbatches, parallel.chunks)
    yield from [problem] if problem else _wrong_updates(config, schedule)
    yield from limits.too_many_passes(parallel, config.mesh.p)
    passes = config.train.steps * config.mesh.p * parallel.microbatches
    if schedule.asynchronous and passes > _MOST_PASSES:
        yield (
            f"train.steps = {config.train.steps}: schedule {schedule.name} is laid out for the "
            f"whole run, here {passes} forward passes; use at most "
            f"{_MOST_PASSES // (config.mesh.p * parallel.microbatches)} steps"
        )
    saving = config.checkpoint
    for key, value, none in (("every", saving.every, 0), ("keep_best", saving.keep_best, "false")):
        if schedule.asynchronous and value:
            yield (
                f"checkpoint.{key} = {str(value).lower()}: schedule {schedule.name} has passes in "
                f"flight whenever a step ends; use {none}, or a schedule that is synchronous"
            )
    if schedule.asynchronous and config.train.dtype == "float16":
        yield (
            f"train.dtype = float16: under schedule {schedule.name} no step can be left out when "
            "its gradient overflows; use bfloat16, or a schedule that is synchronous"
        )
    if (
        parallel.zero == 2
        and config.mesh.d * config.mesh.c > 1
        and {*split.own.split()} & {*split.m.split()}
    ):
        yield (
            f"parallel.zero = 2: not where a weight is on the diagonal only ({parallel.way}); use "
            "parallel.zero = 1 or 3, or scheme 3d"
        )


def _wrong_stages(stages: Sequence[int], parts: int, layers: int) -> Iterator[str]:
    """An uneven distribution of the layers that is invalid."""
    if len(stages) != parts:
        yield (
            f"parallel.layers_per_stage has {len(stages)} numbers for {parts} parts: give one per "
            "part"
        )
    elif min(stages) < 0:
        yield (
            f"parallel.layers_per_stage = {list(stages)}: a part with {min(stages)} layers; use 0 "
            "or more"
        )
    elif sum(stages) != layers:
        yield (
            f"parallel.layers_per_stage = {list(stages)}: {sum(stages)} layers, but model.layers "
            f"= {layers}: give each part its layers"
        )


def _wrong_updates(config: Config, schedule: Schedule) -> Iterator[str]:
    """What needs all stages at one time, under a schedule where each updates on its own."""
    if not schedule.update_per_microbatch:
        return
    if config.train.clip:
        yield (
            f"train.clip = {config.train.clip}: under schedule {schedule.name} every stage "
            "updates on its own, and no stage knows the norm of the whole gradient; use "
            "train.clip = 0"
        )
    if config.model.tied and config.mesh.p > 1:
        yield (
            f"model.tied = true: under schedule {schedule.name} the two copies of the table would "
            "part; use model.tied = false"
        )


def _indivisible(
    key: str, value: int, axes: Iterable[str], sizes: Mapping[str, int]
) -> Iterator[str]:
    count = prod(sizes[axis] for axis in axes)
    if value % count:
        yield (
            f"{key} = {value} does not divide over mesh axes {_named(axes, sizes)} = {count}: "
            f"use a multiple of {count}, or other [mesh] sizes"
        )


def _named(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes)


def _with_cuboid(config: Config, ranks: int) -> Config:
    """`config` with x, y and z: those given, or the best that its sizes allow."""
    given = [axis for axis in ("x", "y", "z") if getattr(config.mesh, axis) is not None]
    others = config.mesh.p * config.mesh.d * config.mesh.c * config.mesh.e
    if given or others < 1 or ranks % others:
        sizes = {axis: getattr(config.mesh, axis) or 1 for axis in "xyz" if axis not in given}
        return replace(config, mesh=replace(config.mesh, **sizes))
    if ranks == others:
        return replace(config, mesh=replace(config.mesh, x=1, y=1, z=1))
    best = min(_cuboids(config, ranks // others), key=received_elements, default=None)
    if best is None:
        raise ValueError(
            f"mesh: no cuboid of {ranks // others} ranks divides this model under "
            f"{config.parallel.way}: set mesh.x, mesh.y and mesh.z, or change [model] or batch"
        )
    return best


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    low = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _cuboids(config: Config, ranks: int) -> Iterator[Config]:
    """`config` on every x * y * z = ranks that breaks no rule."""
    for x, y in product(divisors(ranks), repeat=2):
        if ranks % (x * y) == 0:
            mesh = replace(config.mesh, x=x, y=y, z=ranks // (x * y))
            found = replace(config, mesh=mesh)
            if not violations(found, mesh.grid().size):
                yield found


def received_elements(config: Config) -> float:
    """Elements that a rank receives forward in a block: [MK (n-1) + KN (m-1) + MN (k-1)] / P."""
    split, sizes = config.splits()["dense"], config.mesh.sizes()
    rows = config.train.batch * config.model.sequence
    m, n, k = (
        prod(sizes[axis] for axis in letter.split()) for letter in (split.m, split.n, split.k)
    )
    total = 0
    for each in block_products(config.model):
        across, along = (k, n) if each.turned else (n, k)
        received = each.inputs * (across - 1) + each.outputs * (along - 1)
        total += rows * each.rows * received + each.weights * (m - 1)
    return total / (m * n * k)


def _enlarged_default(config: Config, ranks: int) -> Config:
    """The default model, its sizes raised to multiples of `ranks` where no cuboid divides them."""
    try:
        _with_cuboid(config, ranks)
        return config
    except ValueError:
        heads, batch = (-(-size // ranks) * ranks for size in (64, config.train.batch))
        model = replace(config.model, heads=heads, hidden=6 * heads)
        return replace(config, model=model, train=replace(config.train, batch=batch))
