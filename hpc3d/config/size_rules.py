"""Rules that require model sizes to be divisible by the sizes of mesh axes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cache
from math import inf, lcm, prod
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.comm.grid import divisors
from hpc3d.comm.mesh import CONTEXT, COPIES, DATA
from hpc3d.config.input_file import Config, ModelConfig
from hpc3d.config.limits import MOST_RANKS
from hpc3d.config.parallel_rules import unexchanged_heads
from hpc3d.config.wrong_values import reported
from hpc3d.console.sanitize import counted, nearest_values
from hpc3d.model.families import block_products, family_of
from hpc3d.model.spec import ModelSizes
from hpc3d.ops.rotary import Rotation
from hpc3d.tensor.rounding import TILE

if TYPE_CHECKING:
    from hpc3d.tensor.split import Split

Axes = tuple[str, ...]

# Maximum number of elements per array, so that its size in bytes fits in int64.
_MOST_ELEMENTS = 2**56
_SMALLEST = ModelSizes(layers=1, hidden=1, heads=1, sequence=1, vocabulary=1)


def violations(config: Config, ranks: int) -> list[str]:
    """Return a message for a mesh with the wrong number of ranks.

    If the number is correct, return the messages for sizes that the mesh or the scheme cannot use.
    """
    if wrong := [*reported(_wrong_ranks(config, ranks))]:
        return wrong
    return [*reported(_unused_axes(config), _wrong_sizes(config))]


def _wrong_ranks(config: Config, ranks: int) -> Iterator[str]:
    grid = config.mesh.grid()
    if (total := grid.size) != ranks:
        factors = " x ".join(f"{axis} {size}" for axis, size in grid.sizes.items() if size > 1)
        meant = f"{factors} = {total} ranks" if factors else "1 rank"
        there = f"but the job has {counted(ranks, 'rank')}"
        yield f"mesh: {meant}, {there}; change [mesh], or use {counted(total, 'rank')}"


def _unused_axes(config: Config) -> Iterator[str]:
    sizes, splits = config.mesh.grid().sizes, config.splits.values()
    axes = " ".join(getattr(split, letter) for split in splits for letter in "mnk").split()
    for axis in ("x", "y", "z"):
        if sizes[axis] > 1 and axis not in axes:
            yield f"mesh.{axis} = {sizes[axis]}: the scheme does not use axis {axis}; use 1"


def wrong_parts(config: Config) -> Iterator[str]:
    """Report model and batch sizes that are invalid for every mesh."""
    model = config.model
    heads = _wrong_heads(model), _wrong_kv_heads(model), wrong_tokens(model), _wrong_head(config)
    others = _wrong_window(model), _wrong_microbatches(config)
    yield from reported(too_large(config), *heads, *others)


def too_large(config: Config) -> Iterator[str]:
    """Yield a message for a mesh with too many ranks and for each array with too many elements."""
    model, products = config.model, block_products(config.model)
    ranks = config.mesh.grid().size
    if ranks > MOST_RANKS:
        yield f"mesh: {ranks} ranks; use at most {MOST_RANKS}"
    vocabulary = model.vocabulary or 0
    widest = max(*(each.experts * each.outputs for _, each in products), vocabulary)
    if scores := not config.chunked():
        widest = max(widest, model.heads * model.sequence)
    arrays = {
        "model.layers x weights of a block": sum(count * each.weights for count, each in products),
        "model.hidden x (vocabulary + sequence)": model.hidden * (vocabulary + model.sequence),
        "train.batch x model.sequence x the largest of layer width, vocabulary"
        + scores * " and heads x sequence": config.train.batch * model.sequence * widest,
    }
    for name, count in arrays.items():
        if count > _MOST_ELEMENTS:
            yield f"{name} = {count} exceeds {_MOST_ELEMENTS} elements; reduce one of these sizes"


def _wrong_heads(model: ModelConfig) -> Iterator[str]:
    if model.head_dim is None and model.hidden % model.heads:
        key = f"model.hidden = {model.hidden}"
        yield f"{key} must be divisible by model.heads = {model.heads}; change one of them"
    elif family_of(model).rotary:
        rotated = Rotation(share=model.rope_fraction).rotated(model.head_width)
        key = "model.head_dim" if model.head_dim else "model.hidden / model.heads"
        key += " x model.rope_fraction" * (model.rope_fraction < 1)
        if rotated % 2 or not rotated:
            yield f"{key} = {rotated} must be even and positive for RoPE; change one of the keys"


def _wrong_kv_heads(model: ModelConfig) -> Iterator[str]:
    if model.kv_heads and model.heads % model.kv_heads:
        key = f"model.heads = {model.heads} must be divisible by model.kv_heads = {model.kv_heads}"
        yield f"{key}; use {nearest_values(divisors(model.heads), model.kv_heads)} key-value heads"


def _wrong_window(model: ModelConfig) -> Iterator[str]:
    if model.global_every == 1:
        why = f"gives no block the window model.window = {model.window}"
        yield f"model.global_every = 1 {why}; use at least 2, or 0 for a window in every block"


def _wrong_microbatches(config: Config) -> Iterator[str]:
    sequences, micros = config.train.batch, config.parallel.microbatches
    if sequences % micros:
        key = f"train.batch = {sequences} must be divisible by parallel.microbatches = {micros}"
        yield f"{key}; use a multiple of {micros}, or other parallel.microbatches"


def wrong_tokens(model: ModelConfig, mask: int | None = None) -> Iterator[str]:
    """Report invalid IDs of special tokens, and vocabularies with only special tokens.

    `mask` is the ID of the tokenizer's mask token, if it has one and is known.
    """
    last = (model.vocabulary or inf) - 1
    least = 2 if model.padding is None else 3
    if not family_of(model).causal and last + 1 < least:
        special = "the mask token" + " and the padding token" * (least > 2)
        yield (
            f"model.vocabulary = {model.vocabulary}: model.kind = {model.kind} needs at least one "
            f"token besides {special}; use at least {least}"
        )
    key = f"model.padding = {model.padding}"
    if model.padding is not None and model.padding == mask:
        yield f"{key} is the ID of the tokenizer's mask token; use the ID of its padding token"
    elif model.padding is not None and model.padding >= last:
        yield (
            f"{key} must be below {last}, the ID of the mask token; use a smaller ID, or increase "
            "model.vocabulary"
        )


def _alike(config: Config) -> bool:
    """Return True if the model's head has a product Y = X W with equal layouts of X and Y."""
    return any(each.alike for each in family_of(config.model).head(_SMALLEST))


def _wrong_head(config: Config) -> Iterator[str]:
    """Report an error if several axes shard dimension k of X[m, k], but the head supports one."""
    split = config.splits["dense"]
    if _alike(config) and len(split.x[1]) > 1:
        head = f"the head of model.kind = {config.model.kind} supports only one axis in k"
        remedy = "move the others to parallel.split.m or parallel.split.n"
        yield f"parallel.split.k = {split.k}: {head}; {remedy}"


def _wrong_sizes(config: Config) -> Iterator[str]:
    """Report model sizes that are not divisible by the sizes of the axes that shard them."""
    sizes, needs = config.grid().sizes, _needs(config)
    for (key, value), axis_groups in needs.items():
        for axes in sorted(axis_groups):
            count = prod(sizes[axis] for axis in axes)
            if value % count:
                named = _named(axes, config.parallel.shard)
                remedy = f"use a multiple of {count}, or other [mesh] sizes"
                yield f"{key} = {value} must be divisible by {named} = {count}; {remedy}"
    for axes in sorted(needs["model.heads", config.model.heads]):
        count = prod(sizes[axis] for axis in axes)
        named = _named(axes, config.parallel.shard)
        yield from _unshared_keys(config.model, named, count)
        yield from _uneven_tiles(config, named, count)
        if config.mesh.c > 1:
            yield from unexchanged_heads(config, count)


def sequence_divisor(config: Config) -> int:
    """Return the number whose multiples are the valid numbers of sequences per microbatch."""
    sizes = config.grid().sizes
    groups, *_ = _needs(config).values()
    return lcm(*(prod(sizes[axis] for axis in axes) for axes in groups))


def _needs(config: Config) -> dict[tuple[str, int], set[Axes]]:
    """Return the divisibility requirements on sizes, as {(key, value): axis groups}.

    A value must be divisible by the number of ranks in each of its groups of mesh axes.
    """
    model, sizes = config.model, config.grid().sizes
    sequences, micros = config.train.batch, config.parallel.microbatches
    batch = "train.batch" if micros == 1 else "train.batch / parallel.microbatches"
    used = frozenset(axis for axis, size in sizes.items() if size > 1)
    splits = config.splits["dense"], config.splits["experts"]
    groups = _axis_groups(*splits, used, bool(model.experts), _alike(config))
    needs = {
        (batch, sequences // micros): groups.batch,
        (f"{batch} x model.sequence", sequences // micros * model.sequence): groups.rows,
        ("model.heads", model.heads): groups.heads,
        ("model.hidden", model.hidden): groups.hidden,
    }
    if model.head_dim is not None:
        features = model.heads * model.head_dim
        needs["model.heads x model.head_dim", features] = groups.attended
    if model.ffn is not None:
        needs["model.ffn", model.ffn] = groups.heads | groups.ffn
    return needs


class _AxisGroups(NamedTuple):
    """Groups of mesh axes; a size must be divisible by the number of ranks in each of its groups.

    `batch` applies to the sequences of a microbatch, and `rows` to its tokens.
    """

    batch: set[Axes]
    rows: set[Axes]
    heads: set[Axes]
    hidden: set[Axes]
    attended: set[Axes]
    ffn: set[Axes]


@cache
def _axis_groups(
    split: Split, of_experts: Split, used: frozenset[str], experts: bool, alike: bool
) -> _AxisGroups:
    """Return the axis groups of the splits of dense layers and of experts.

    Axes that are not in `used` have one rank. `experts` is True if the model has experts, and
    `alike` if the head has a product whose X and Y have equal layouts.
    """
    turned, outer = split.next(), split.without_panels()
    whole = {split.y[0], outer.y[0]}  # attention and the loss need full sequences
    rows, hidden = {split.x[0], turned.y[0]}, {split.x[1], turned.w[1], outer.next().w[1]}
    pairs = [(each.of_gradient.w, each.next().of_gradient.w) for each in (split, of_experts)]
    hidden |= {w.even for pair in pairs for w in pair}
    if experts:
        router = split.by_rows()
        rows.add(router.y[0])
        hidden |= {router.w.even, router.of_gradient.w.even}
    if alike:
        head = split.alike()
        hidden |= {head.w.even, head.of_gradient.w.even}
    return _AxisGroups(
        batch={tuple([axis for axis in axes if axis != CONTEXT]) for axes in _used(whole, used)},
        rows=_used(rows, used) - _used(whole, used),
        heads=_used({split.y[1], turned.x[1]}, used),
        hidden=_used(hidden, used),
        attended=_used({turned.of_gradient.w.even}, used),
        ffn=_used({split.w[1], *(w.even for _, w in pairs)}, used),
    )


def _used(axis_groups: Iterable[Axes], used: Collection[str]) -> set[Axes]:
    return {tuple([axis for axis in axes if axis in used]) for axes in axis_groups}


def _unshared_keys(model: ModelConfig, axes: str, count: int) -> Iterator[str]:
    """Report a number of KV heads that neither is a multiple of `count` nor divides `count`.

    `count` is the number of ranks along `axes`, which shard the heads.
    """
    keys = model.kv_heads or model.heads
    if model.heads % count or keys % count == 0 or count % keys == 0:
        return
    fit = [n for n in divisors(model.heads) if n % count == 0 or count % n == 0]
    over = f"must be divisible by {axes} = {count} or divide it"
    yield f"model.kv_heads = {keys} {over}; use {nearest_values(fit, keys)}, or other [mesh] sizes"


def _uneven_tiles(config: Config, axes: str, count: int) -> Iterator[str]:
    """Report float8 scaling tiles with query and key columns: results would depend on the mesh."""
    model, train = config.model, config.train
    keys, width = model.kv_heads or model.heads, model.head_width
    if (train.product_dtype, train.product_scale) != ("float8", "block") or count == 1:
        return
    columns = model.heads // count * width, max(1, keys // count) * width
    if keys < model.heads and any(each % TILE for each in columns):
        yield (
            f"train.product_scale = block: with {axes} = {count}, a rank has {columns[0]} "
            f"query columns and {columns[1]} key columns, but both must be multiples of {TILE}; "
            "use train.product_scale = tensor, or other [mesh] sizes"
        )


def _named(axes: Iterable[str], shard: int) -> str:
    """Return the keys that set the sizes of `axes`; `shard` is the value of parallel.shard."""
    axes = [*axes]
    group = "parallel.shard" if shard and COPIES not in axes else "mesh.d"
    keys = {COPIES: group, DATA: group}
    return " x ".join(dict.fromkeys(keys.get(axis, f"mesh.{axis}") for axis in axes))
