"""Cases of long tables: which of them `make test` runs, and which pairs there are."""

import os
import time

import pytest

WEEK = 7
TODAY = int(os.environ.get("DAY", time.time() // 86400)) % WEEK


def rotating(day):
    """The mark of a test that runs on one day of the week (UTC), or with DAY=0 to 6 set."""
    reason = f"runs on one day of {WEEK}: DAY={day % WEEK}"
    return pytest.mark.skipif(day % WEEK != TODAY, reason=reason)


def strided(cases, every, first=0, ids=str):
    """All cases as parameters, of which one in `every`, from `first` on, is quick."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=ids(case),
            marks=[pytest.mark.slow] if place % every != first else [],
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
