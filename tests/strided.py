"""Long tables of cases: `make test` takes some of them, `make test-slow` the others."""

import pytest


def strided(cases, every, first=0, ids=str):
    """All cases as parameters, of which one in `every`, from `first` on, is quick."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]),
            id=ids(case),
            marks=[] if place % every == first else [pytest.mark.slow],
        )
        for place, case in enumerate(cases)
    ]
