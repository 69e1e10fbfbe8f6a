"""A finding: a verdict on a subject, with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hpc3d.plain import plain

OK, WARN, FAIL = "ok", "warn", "FAIL"


class Finding(NamedTuple):
    """`verdict` (OK, WARN, FAIL) on a `subject`: the `text`, what to do where it is wrong, and the
    lines that something else `printed`."""

    verdict: str
    subject: str
    text: str
    remedy: str = ""
    printed: tuple = ()

    def lines(self) -> list[str]:
        """As people read it: a line, under it what was printed, and the remedy."""
        remedy = self.remedy.split("\n") if self.remedy else []
        return [
            plain(f"{self.verdict:5} {self.subject}: {self.text}"),
            *(f"      {plain(line)}" for line in self.printed),
            *(f"      -> {plain(line)}" for line in remedy),
        ]


def examine(check: Callable[..., Iterable[Finding]], *args: Any) -> Iterator[Finding]:
    """The findings of a check; what it raises is one, too."""
    try:
        yield from check(*args)
    except Exception as error:
        subject, what = (
            check.__name__.replace("_", " ").strip(),
            f"{type(error).__name__}: {error}",
        )
        remedy = "it may need what else is wrong here: repair that first"
        yield Finding(WARN, subject, f"could not be checked ({what})", remedy)
