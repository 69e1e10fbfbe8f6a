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
    StateSpec("first_scales", "float32", (1, BLOCK), _in_blocks),
    StateSpec("second_scales", "float32", (1, BLOCK), _in_blocks),
)


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments: 2 + 8 / 256 bytes per element of a matrix.

    Each moment is stored as codes with one scale per 256 columns of a row. Vectors, and matrices
    with fewer than 256 columns, have moments in full precision.
    """

    STATES = (*(spec._replace(of=_in_full) for spec in AdamW.STATES), *_STORED)
    WHOLE_MATRICES = is_matrix

    def update(self, learning_rate: float, scale: float) -> None:
        """Apply an AdamW step computed in full precision; quantize the new moments for storage."""
        super().update(learning_rate, scale)
        factors = self.factors(learning_rate, scale)
        for part, arrays, states, keep in self.matrices(learning_rate * self.weight_decay):
            flat = [None if each is None else each.reshape(-1) for each in arrays]
            kept = {name: state.reshape(-1) for name, state in states.items()}
            if in_blocks(part.item.shape):
                moments = tuple(kept[spec.name] for spec in _STORED)
                adamw_8bit(*flat, moments, self.constants, (*factors, keep))
            else:
                moments = kept["first"], kept["second"]
                adamw(*flat, *moments, self.constants, (*factors, keep))
