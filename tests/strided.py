"""Long tables of cases: `make test` takes some of them, `make test-slow` others, and
`make test-exhaustive` the rest."""

import pytest


def strided(cases, every, first=0, ids=str, slow=1):
    """All cases as parameters, of which one in `every`, from `first` on, is quick, and of the
    others one in `slow`, or none, is slow."""
    rest = 0
    found = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marks = []
        if place % every != first:
            marks = [pytest.mark.slow if slow and rest % slow == 0 else pytest.mark.exhaustive]
            rest += 1
        found.append(pytest.param(*values, id=ids(case), marks=marks))
    return found
