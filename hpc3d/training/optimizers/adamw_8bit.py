"""AdamW with 8-bit moments for matrices (Dettmers et al., arXiv:2110.02861)."""

from __future__ import annotations

from collections.abc import Sequence

from hpc3d.ops.quantize import BLOCK, adamw_8bit, in_blocks
from hpc3d.ops.update import adamw
from hpc3d.training.optimizers.optimizer import AdamW, StateSpec, is_matrix


def _in_blocks(name: str, shape: Sequence[int]) -> bool:
    return in_blocks(shape)


def _in_full(name: str, shape: Sequence[int]) -> bool:
    return not in_blocks(shape)


_STORED = (
    StateSpec("first_codes", "uint8", of=_in_blocks),
    StateSpec("second_codes", "uint8", of=_in_blocks),
    StateSpec("first_scales", "float32", (1, BLOCK), _in_blocks, "first_codes"),
    StateSpec("second_scales", "float32", (1, BLOCK), _in_blocks, "second_codes"),
)


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments: 2 + 8 / 256 bytes per element of a matrix.

    Each moment is stored as codes with one scale per 256 columns of a rank's row. The last block
    of the row is shorter if the number of columns is not a multiple of 256. Vectors, and matrices
    with fewer than 256 columns, have moments in full precision.
    """

    STATES = (*(spec._replace(of=_in_full) for spec in AdamW.STATES), *_STORED)
    WHOLE_MATRICES = is_matrix

    def update(self, learning_rate: float, scale: float) -> None:
        """Apply an AdamW step computed in full precision; quantize the new moments for storage."""
        super().update(learning_rate, scale)
        factors = self.factors(learning_rate, scale)
        for part, arrays, states, keep in self.matrices(learning_rate * self.weight_decay):
            blocked = in_blocks(part.item.shape)
            shape = (-1, part.shape[-1]) if blocked else (-1,)
            value, master, grad = (
                None if each is None else each.reshape(shape) for each in arrays
            )
            if blocked:
                stored = [states[spec.name] for spec in _STORED]
                moments = tuple(each.reshape(-1, each.shape[-1]) for each in stored)
                adamw_8bit(value, master, grad, moments, self.constants, (*factors, keep))
            else:
                first, second = (states[name].reshape(-1) for name in ("first", "second"))
                adamw(value, master, grad, first, second, self.constants, (*factors, keep))
