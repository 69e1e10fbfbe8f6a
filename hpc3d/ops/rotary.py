"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from functools import cache
from math import log, pi
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
    """Rotary frequencies: base^(-2 i / width) rad/position for feature pair i of a head.

    Pairs with a period above `original` / `low` positions rotate `factor` times more slowly. Pairs
    with a period below `original` / `high` are unchanged, with linear interpolation in between.
    This is the scaling type "llama3" of Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783, and
    transformers' modeling_rope_utils). A factor of 1 disables the scaling.
    """

    base: float = 10000.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def frequencies(self, width: int) -> np.ndarray:
        """Return the frequencies of the width / 2 pairs of a head, in radians per position."""
        plain = np.exp(-log(self.base) / width * np.arange(0, width, 2))
        if self.factor == 1.0:
            return plain
        rotations = self.original * plain / (2 * pi)  # per original context length
        kept = np.clip((rotations - self.low) / (self.high - self.low), 0.0, 1.0)
        return kept * plain + (1 - kept) * plain / self.factor


@cache
def rotary_table(rotation: Rotation, sequence: int, width: int, dtype: DTypeLike) -> np.ndarray:
    """Return the cosines and sines of the rotary angles for all positions, [2, T, width / 2]."""
    angles = np.arange(sequence)[:, None] * rotation.frequencies(width)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(dtype)


@primitive
def rotate(x: Array, table: Array, form: HeadForm, sign: int = 1) -> Array:
    """Rotate q and k of x [B*T, heads*(g+2)*D], which has the layout of qkv, in place.

    With sign -1, rotate in the opposite direction, as the backward pass does. The pairs (i, i + D
    / 2) of a head rotate by the angle of their position, as in Llama's published weights: (a, b)
    -> (a cos - b sin, b cos + a sin). `table` [2, T, D / 2] is the rotary table for the positions
    of the rows.
    """
    _, sequence, half = table.shape
    parts, turned = form.turned(x.shape[1])
    pairs = x.reshape(-1, sequence, x.shape[1] // (parts * form.width), parts, 2, half)
    cosine, sine = table[:, :, None, None]

    def block(sample):
        a, b = sample[:, :, :turned, 0], sample[:, :, :turned, 1]
        first = a * cosine
        first -= b * sine if sign > 0 else b * -sine
        b *= cosine
        b += a * sine if sign > 0 else a * -sine
        a[...] = first

    parallel_for(block, pairs)
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
    sizes = {"parts": parts, "turned": turned, "width": form.width, "columns": x.shape[1]}
    gpu.launch("rotate", *x.shape, x=x, **given, **sizes, sign=sign)
    return x
