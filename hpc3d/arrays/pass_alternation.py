"""Alternation of two passes of a rank, so that one computes while the other communicates.

The passes run in one thread. A pass posts a collective and calls `switch`. The other pass then
computes until it has posted a collective itself, and switches back before it waits. Every rank
runs the same two passes, so all ranks post their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any


class PassAlternation:
    """Two alternating passes, or one pass, for which `switch` has no effect.

    Each pass has its own values of the attributes `names` of `owner`.
    """

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self.owner, self.names = owner, names
        self.other: Any = None  # greenlet of the pass that is not running

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run two passes, which alternate at each `switch`.

        When one of the passes ends, the other one runs to its end.
        """
        # Runs without alternating passes do not import greenlet.
        from greenlet import greenlet

        begin = self._values()

        def run_second():
            self._set(begin)
            try:
                second()
            finally:
                self.other = None

        self.other = greenlet(run_second)
        self.other.gr_context = copy_context()
        try:
            first()
        finally:
            other, self.other = self.other, None
        if other is not None:
            other.switch()
        self._set(begin)

    def switch(self) -> None:
        """Run the other pass until it calls `switch` or ends."""
        if self.other is None:
            return
        from greenlet import getcurrent

        mine, other = self._values(), self.other
        self.other = getcurrent()
        other.switch()
        self._set(mine)

    def _values(self) -> list[Any]:
        return [getattr(self.owner, name) for name in self.names]

    def _set(self, values: Sequence[Any]) -> None:
        for name, value in zip(self.names, values, strict=True):
            setattr(self.owner, name, value)
