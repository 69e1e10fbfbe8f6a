"""Rotation of slow tests: the cases that `make test` runs, and the day of each slow test."""

import json
import os
import re
import time
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

from tests.jobs import Case

REASON = re.compile(r"runs on one of (\d+) days: DAY=(\d+)")
TODAY = os.environ.get("DAY", int(time.time() // 86400))


def rotating(turn, days=7):
    """Return the mark of a test that runs on one of `days` days.

    DAY=0, 1, ... selects the day, and DAY=all selects all days.
    """
    reason = f"runs on one of {days} days: DAY={turn % days}"
    other = TODAY != "all" and int(TODAY) % days != turn % days
    return pytest.mark.skipif(other, reason=reason)


daily = rotating(0, days=1)


@cache
def costs():
    """Return the CPU seconds of each test function, as measured by `make test-profile`."""
    return json.loads((Path(__file__).parent / "costs.json").read_text(encoding="utf-8"))


def mark_slow(item):
    """Mark a slow test to run on one of seven days, unless a mark already selects its days."""
    if item.get_closest_marker("slow") and not _rotations(item):
        item.add_marker(rotating(_turn(item)))


def _turn(item):
    """Return a number whose remainder modulo the number of days selects the day of a test.

    Functions are assigned to days by cost, and their cases by name. Cases that share an MPI job
    run on the same day.
    """
    function, _, case = item.nodeid.partition("[")
    job = getattr(item, "callspec", None) and item.callspec.params.get("case")
    if isinstance(job, Case):
        case = str(job[:2])
    place = _places().get(function, crc32(function.encode()))
    return place + crc32(case.encode())


@cache
def _places():
    """Return the rank of each measured test function by cost, starting with the highest cost."""
    names = sorted(costs(), key=costs().get, reverse=True)
    return {name: place for place, name in enumerate(names)}


def days_of(item):
    """Return the days of a week on which a test runs."""
    pairs = _rotations(item)
    return [day for day in range(7) if all(day % days == turn for days, turn in pairs)]


def _rotations(item):
    """Return the pairs (days, turn) of the marks `rotating` of a test."""
    reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
    found = filter(None, map(REASON.fullmatch, reasons))
    return [tuple(map(int, each.groups())) for each in found]


def strided(cases, every, first=0, ids=str, days=7):
    """Return all cases as parameters; one in `every`, from `first` on, is fast.

    The other cases are slow, and each runs on one of `days` days.
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
    """Return tuples (row, *column): each row with the next `count` columns."""
    return [
        (row, *columns[(place * count + offset) % len(columns)])
        for place, row in enumerate(rows)
        for offset in range(count)
    ]


def covering(lines, keys=None):
    """Return the lines of key=value words that contain a word which no earlier line has.

    If `keys` are given, only words with these keys count.
    """
    seen, chosen = set(), []
    for line in lines:
        words = {word for word in line.split() if not keys or word.partition("=")[0] in keys}
        if words - seen:
            chosen.append(line)
        seen |= words
    return chosen
