"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, floor, log, pi, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.narrow import widened
from hpc3d.arrays.primitive import primitive
from hpc3d.arrays.worker_threads import parallel_for

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.ops.attention import HeadForm


class Rotation(NamedTuple):
    """Rotary frequencies: base^(-2 i / r) rad/position for pair i of the r rotated features.

    `share` is the fraction of the features of a head that are rotated. `factor` scales the
    frequencies for longer sequences, as the function `type` in SCALINGS does; 1 disables the
    scaling. `original` is the sequence length without scaling, and `sequence` with scaling.

    "llama3" uses `low` and `high`, "yarn" uses `fast` and `slow`, and "longrope" uses `short` and
    `long`, which contain a divisor for each pair. "yarn" and "longrope" also multiply q and k by
    `attention`. The rotated features of q and k are also multiplied by `gain`.
    """

    base: float = 10000.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: float = 8192
    type: str = "llama3"
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    sequence: int = 0
    share: float = 1.0
    gain: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def rotated(self, width: int) -> int:
        """Return the number of rotated features of a head with `width` features."""
        return int(width * self.share)

    def frequencies(self, width: int) -> np.ndarray:
        """Return the frequencies of the rotated pairs of a head, in radians per position."""
        rotated = self.rotated(width)
        plain = np.exp(-log(self.base) / rotated * np.arange(0, rotated, 2))
        unscaled = self.factor == 1.0 and not self.short
        return plain if unscaled else SCALINGS[self.type].frequencies(self, plain)

    @property
    def amplitude(self) -> float:
        """Factor by which q and k are multiplied."""
        usual = SCALINGS[self.type].attention
        if usual is None:
            return self.gain
        return self.gain * (usual(self) if self.attention is None else self.attention)


def _linear(rotation, plain):
    """Divide all frequencies by the factor, which interpolates positions (arXiv:2306.15595)."""
    return plain / rotation.factor


def _dynamic(rotation, plain):
    """Increase the base for sequences longer than the original ones ("dynamic NTK")."""
    stretch = max(1.0, rotation.sequence / rotation.original)
    ratio = rotation.factor * stretch - (rotation.factor - 1)
    pairs = len(plain)
    return plain * ratio ** (-np.arange(pairs) / max(pairs - 1, 1))


def _llama3(rotation, plain):
    """Scale pairs with a long period (Grattafiori et al. 2024, arXiv:2407.21783).

    Pairs with a period above `original` / `low` positions rotate `factor` times more slowly. Pairs
    with a period below `original` / `high` are unchanged, with linear interpolation in between.
    """
    rotations = rotation.original * plain / (2 * pi)  # per original context length
    kept = np.clip((rotations - rotation.low) / (rotation.high - rotation.low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / rotation.factor


def _yarn(rotation, plain):
    """Scale pairs by the number of rotations per original length (YaRN, arXiv:2309.00071).

    Pairs with fewer than `slow` rotations rotate `factor` times more slowly. Pairs with more than
    `fast` rotations are unchanged, with linear interpolation over the indices in between.
    """
    pairs = len(plain)
    turns = (rotation.original / (2 * pi * each) for each in (rotation.fast, rotation.slow))
    first, last = (pairs * log(each) / log(rotation.base) for each in turns)
    first, last = max(floor(first), 0), min(ceil(last), 2 * pairs - 1)
    ramp = (np.arange(pairs) - first) / (last - first or 0.001)
    scaled = np.clip(ramp, 0.0, 1.0)
    return scaled * plain / rotation.factor + (1 - scaled) * plain


def _yarn_attention(rotation):
    """Return the default of `attention` (Peng et al. 2023, equation 22)."""
    return 0.1 * log(rotation.factor) + 1


def _longrope(rotation, plain):
    """Divide each frequency by a separate number (LongRoPE, arXiv:2402.13753).

    The divisors are `long` if `sequence` exceeds `original`, otherwise `short`.
    """
    stretched = rotation.sequence > rotation.original
    return plain / np.array(rotation.long if stretched else rotation.short)


def _longrope_attention(rotation):
    """Return the default of `attention` (Abdin et al. 2024, arXiv:2404.14219)."""
    factor = rotation.factor
    return sqrt(1 + log(factor) / log(rotation.original)) if factor > 1 else 1.0


class Scaling(NamedTuple):
    """Type of RoPE scaling: (rotation, unscaled frequencies) -> frequencies, and its parameters.

    `keys` are the required parameters, fields of `Rotation`, and `others` the optional ones.
    `attention` returns the default factor by which q and k are multiplied. It is `None` if the
    type has no such factor.
    """

    frequencies: Callable[[Rotation, np.ndarray], np.ndarray]
    keys: tuple[str, ...]
    others: tuple[str, ...] = ()
    attention: Callable[[Rotation], float] | None = None


SCALINGS = {
    "linear": Scaling(_linear, ("factor",)),
    "dynamic": Scaling(_dynamic, ("factor", "original")),
    "llama3": Scaling(_llama3, ("factor", "low", "high", "original")),
    "yarn": Scaling(_yarn, ("factor", "original"), ("fast", "slow", "attention"), _yarn_attention),
    "longrope": Scaling(
        _longrope, ("factor", "original", "short", "long"), ("attention",), _longrope_attention
    ),
}


@cache
def rotary_table(rotation: Rotation, sequence: int, width: int, dtype: DTypeLike) -> np.ndarray:
    """Return the cosines and sines of the rotary angles for all positions, [2, T, r / 2].

    r is the number of rotated features of a head with `width` features.
    """
    angles = np.arange(sequence)[:, None] * rotation.frequencies(width)
    table = rotation.amplitude * np.stack([np.cos(angles), np.sin(angles)])
    return table.astype(dtype)


@primitive
def rotate(x: Array, table: Array, form: HeadForm, sign: int = 1) -> Array:
    """Rotate q and k of x [B*T, heads*(g+2)*D], which has the layout of qkv, in place.

    With sign -1, rotate in the opposite direction, as the backward pass does. The pairs (i, i + r
    / 2) of the first r features of a head rotate by the angle of their position, as in Llama's
    published weights: (a, b) -> (a cos - b sin, b cos + a sin). `table` [2, T, r / 2] is the
    rotary table for the positions of the rows.
    """
    _, sequence, half = table.shape
    parts, turned = form.turned(x.shape[1])
    heads = x.reshape(-1, sequence, x.shape[1] // (parts * form.width), parts, form.width)
    cosine, sine = table[:, :, None, None]

    def block(sample):
        queries_and_keys = sample[:, :, :turned]
        a, b = queries_and_keys[..., :half], queries_and_keys[..., half : 2 * half]
        first = a * cosine
        first -= b * sine if sign > 0 else b * -sine
        b *= cosine
        b += a * sine if sign > 0 else a * -sine
        a[...] = first

    parallel_for(block, heads)
    return x


@rotate.narrow
def _(x, table, form, sign=1):
    """Rotate one sample at a time in float32."""
    for sample in x.reshape(-1, table.shape[1], x.shape[1]):
        sample[...] = rotate(widened(sample), table, form, sign)
    return x


rotate.abstract(lambda x, table, form, sign=1: x)


@rotate.cuda
def _(gpu, x, table, form, sign=1):
    given = {"cosines": table[0], "sines": table[1], "first": 0, "period": table.shape[1]}
    parts, turned = form.turned(x.shape[1])
    sizes = {"parts": parts, "turned": turned, "half": table.shape[2], "width": form.width}
    sizes["columns"] = x.shape[1]
    gpu.launch("rotate", *x.shape, x=x, **given, **sizes, sign=sign)
    return x
