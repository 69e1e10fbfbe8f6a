"""Loss scaling for float16, in which small gradients would underflow to zero.

float16 has no numbers between 0 and 2^-24, and many gradients are in that range. The loss is
multiplied by a factor S before the backward pass, and the gradients are multiplied by 1 / S in the
update, in float32 (Micikevicius et al., arXiv:1710.03740, section 3.2). S is as large as the
gradients allow: if a gradient overflows, the update is skipped and S is halved; S is doubled after
PERIOD consecutive updates without overflow. bfloat16 and float32 have enough range and need no
loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class LossScale:
    """Loss scale `factor`, kept between `least` and `most`.

    All three are powers of 2, so that scaling is exact. The factor is identical on all ranks,
    because it depends only on the global gradient norm. If `least` = `most`, the scale is static.
    """

    FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
    PERIOD = 2000

    def __init__(self, factor: float = FIRST, least: float = LEAST, most: float = MOST) -> None:
        self.factor, self.least, self.most, self.row = factor, least, most, 0

    def good(self) -> None:
        """Record an update without overflow."""
        self.row += 1
        if self.row == self.PERIOD:
            self.factor, self.row = min(self.most, 2 * self.factor), 0

    def skipped(self) -> bool:
        """Record an update that was skipped because a gradient is not finite.

        Returns False if the factor is already at its minimum, so that the overflow must have
        another cause.
        """
        if self.factor == self.least:
            return False
        self.factor, self.row = max(self.least, self.factor / 2), 0
        return True

    def state(self) -> dict[str, Any]:
        """Return the dict to store in checkpoints, which is empty if the scale is static."""
        return {} if self.least == self.most else {"factor": self.factor, "row": self.row}

    def restore(self, stored: Mapping[str, Any] | None) -> None:
        """Restore the loss scale from a dict that `state` returned; ignore invalid values.

        The factor is clamped to the current limits. `stored` is read from a checkpoint manifest,
        which is untrusted, and may come from a run with a different dtype.
        """
        match stored:
            case {"factor": float(factor), "row": int(row)} if _power_of_two(factor) and row >= 0:
                self.factor = min(self.most, max(self.least, factor))
                self.row = min(row, self.PERIOD - 1)


def _power_of_two(number: float) -> bool:
    return number > 0 and math.frexp(number)[0] == 0.5


def scale_of(dtype: str) -> LossScale:
    """Create the loss scale for a training dtype; the scale is always 1 except for float16."""
    return LossScale() if dtype == "float16" else LossScale(1.0, 1.0, 1.0)
