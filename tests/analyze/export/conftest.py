"""Traces for the export tests: one of a run, and one with chosen values."""

import pytest

from tests.analyze.delayed_runs import trained
from tests.analyze.small import small

PIPELINE = {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 4, "parallel__schedule": "1f1b"}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Trace of a pipeline with 2 stages and messages, on 4 ranks."""
    with trained(tmp_path_factory.mktemp("real") / "run", 4, **PIPELINE) as trace:
        yield trace


@pytest.fixture(scope="module")
def hand(tmp_path_factory):
    with small(tmp_path_factory.mktemp("hand") / "trace.h5") as trace:
        yield trace


@pytest.fixture(params=["hand", "real"])
def trace(request):
    return request.getfixturevalue(request.param)
