"""Findings of diagnostic checks, each with a verdict, a subject, a text and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hpc3d.console.sanitize import sanitized

OK, WARN, FAIL = "ok", "warn", "FAIL"


class Finding(NamedTuple):
    """Result of a diagnostic check.

    Attributes
    ----------
    verdict
        OK, WARN or FAIL.
    subject
        What was checked.
    text
        Description of the result.
    remedy
        Instructions for fixing the problem, one per line.
    printed
        Output lines of a program that the check has run.
    """

    verdict: str
    subject: str
    text: str
    remedy: str = ""
    printed: tuple = ()

    def lines(self) -> list[str]:
        """Format the finding as lines: the result, then the program output and the remedy."""
        remedy = self.remedy.split("\n") if self.remedy else []
        return [
            sanitized(f"{self.verdict:5} {self.subject}: {self.text}"),
            *(f"      {sanitized(line)}" for line in self.printed),
            *(f"      -> {sanitized(line)}" for line in remedy),
        ]


def examine(check: Callable[..., Iterable[Finding]], *args: Any) -> Iterator[Finding]:
    """Run a check and yield its findings; convert an exception of the check to a finding."""
    try:
        yield from check(*args)
    except Exception as error:
        subject = check.__name__.replace("_", " ").strip()
        what = f"{type(error).__name__}: {error}"
        remedy = "fix the other problems first, since they may be the cause"
        yield Finding(WARN, subject, f"could not be checked ({what})", remedy)
