"""8-bit optimizer moments in a checkpoint, quantized again if their blocks have other borders.

A block of a moment does not extend beyond a rank's columns, so its borders depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.pool import from_host
from hpc3d.ops.quantize import BLOCK, quantize

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.checkpoints.block_slices import BlockSlices

_ELEMENTS_AT_ONCE = 1 << 20


class StoredMoment(NamedTuple):
    """Moment of a matrix in a checkpoint, written by ranks with `width` columns each.

    `fill(array, kind, box)` reads a box of an array, and `kinds` are the kinds of the codes and
    of the scales.
    """

    fill: Callable[[np.ndarray, str, BlockSlices], None]
    kinds: tuple[str, str]
    width: int
    levels: np.ndarray

    def fits(self, columns: int) -> bool:
        """Return True if the blocks of ranks with `columns` columns have the same borders."""
        return columns == self.width or not (columns % BLOCK or self.width % BLOCK)

    def _values(self, box: BlockSlices) -> np.ndarray:
        """Return the decoded values [rows, experts, columns] of a box."""
        rank, column = np.divmod(np.arange(box.left, box.right), self.width)
        block = rank * -(-self.width // BLOCK) + column // BLOCK
        blocks = box._replace(left=int(block[0]), right=int(block[-1]) + 1)
        codes, scales = np.empty(box.shape, np.uint8), np.empty(blocks.shape, np.float32)
        for array, kind, part in zip((codes, scales), self.kinds, (box, blocks), strict=True):
            self.fill(array, kind, part)
        return self.levels[codes] * scales[..., block - block[0]]

    def quantize_to(self, codes: Array, scales: Array, boxes: Iterable[BlockSlices]) -> None:
        """Quantize a rank's shard of the moment in the blocks of this rank.

        `codes` and `scales` are flat. The shard is the sequence of the `boxes`, which have all
        columns of the rank.
        """
        done = 0  # rows of all experts
        for part in chain.from_iterable(map(_in_parts, boxes)):
            columns = part.right - part.left
            values = self._values(part).reshape(-1, columns)
            shapes = values.shape, (len(values), -(-columns // BLOCK))
            found = np.empty(shapes[0], np.uint8), np.empty(shapes[1], np.float32)
            quantize(values, self.levels, *found)
            for array, each in zip((codes, scales), found, strict=True):
                first = done * each.shape[1]
                from_host(array[first : first + each.size], each.reshape(-1))
            done += len(values)


def _in_parts(box: BlockSlices) -> Iterator[BlockSlices]:
    """Split a box into boxes of a limited number of elements."""
    _, experts, columns = box.shape
    step = max(1, _ELEMENTS_AT_ONCE // (experts * columns))
    for top in range(box.top, box.bottom, step):
        yield box._replace(top=top, bottom=min(top + step, box.bottom))
