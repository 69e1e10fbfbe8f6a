"""The loss scale of a run in float16, whose small gradients would be 0 otherwise.

float16 has nothing between 0 and 2^-24, and many gradients lie there.  So the loss is multiplied
by a factor S before backward and the gradients by 1 / S in the update, in float32 (Micikevicius et
al., arXiv:1710.03740, section 3.2).  S is as large as gradients allow: where one overflows, that
update is left out and S halved; it is doubled after PERIOD updates in a row without overflow.
bfloat16 and float32 reach as far down as gradients do, and go without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class LossScale:
    """A `factor` between `least` and `most`, all of them powers of 2, so that it rounds nothing.

    All ranks must call the same: they see the same norm of the gradient, so they do.  `least` =
    `most` makes it static.
    """

    FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
    PERIOD = 2000

    def __init__(self, factor: float = FIRST, least: float = LEAST, most: float = MOST) -> None:
        self.factor, self.least, self.most, self.row = factor, least, most, 0

    def good(self) -> None:
        """An update is done: nothing overflowed."""
        self.row += 1
        if self.row == self.PERIOD:
            self.factor, self.row = min(self.most, 2 * self.factor), 0

    def skipped(self) -> bool:
        """An update is left out, because a gradient is not finite.  False if a smaller factor is
        no remedy: something else is wrong."""
        if self.factor == self.least:
            return False
        self.factor, self.row = max(self.least, self.factor / 2), 0
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain values, and none of a static one."""
        return {} if self.least == self.most else {"factor": self.factor, "row": self.row}

    def restore(self, stored: Mapping[str, Any] | None) -> None:
        """Take what `state` gave, within the limits of today; anything else leaves all as it is:
        a manifest may be of anyone's making, or of a run in another type."""
        match stored:
            case {"factor": float(factor), "row": int(row)} if _power_of_two(factor) and row >= 0:
                self.factor = min(self.most, max(self.least, factor))
                self.row = min(row, self.PERIOD - 1)


def _power_of_two(number: float) -> bool:
    return number > 0 and math.frexp(number)[0] == 0.5


def scale_of(dtype: str) -> LossScale:
    """The LossScale of a run in `dtype`: a factor of 1 for all but float16."""
    return LossScale() if dtype == "float16" else LossScale(1.0, 1.0, 1.0)
