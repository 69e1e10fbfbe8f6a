"""Cases of long tables: which of them `make test` runs, and which pairs there are."""

import os
import re
import time

import pytest

REASON = re.compile(r"runs on one of (\d+) days: DAY=(\d+)")
TODAY = int(os.environ.get("DAY", time.time() // 86400))


def rotating(turn, days=7):
    """The mark of a test that runs on one of `days` days; DAY=0, 1, ... selects the day."""
    reason = f"runs on one of {days} days: DAY={turn % days}"
    return pytest.mark.skipif(turn % days != TODAY % days, reason=reason)


def days_of(item):
    """The days of three weeks on which a test runs."""
    reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
    turns = [map(int, found.groups()) for found in map(REASON.fullmatch, reasons) if found]
    turns = [(turn, days) for days, turn in turns]
    return [day for day in range(21) if all(day % days == turn for turn, days in turns)]


def strided(cases, every, first=0, ids=str, days=3):
    """All cases as parameters, of which one in `every`, from `first` on, is quick.

    Of the others, which are slow, each runs on one of `days` days.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=ids(case),
            marks=[pytest.mark.slow, rotating(place, days)] if place % every != first else [],
        )
        for place, case in enumerate(cases)
    ]


def rotated(rows, columns, count):
    """Tuples (row, *column): each row with `count` columns, the next row with the following."""
    return [
        (row, *columns[(place * count + offset) % len(columns)])
        for place, row in enumerate(rows)
        for offset in range(count)
    ]


def covering(lines, keys=None):
    """The lines of key=value words, in their order, that have a word which no line before has.

    If `keys` are given, only their words count.
    """
    seen, chosen = set(), []
    for line in lines:
        words = {word for word in line.split() if not keys or word.partition("=")[0] in keys}
        if words - seen:
            chosen.append(line)
        seen |= words
    return chosen
