"""Packed timeline steps of a report, unpacked in the same way as in page/steps.js."""

import base64
import json
import zlib

import numpy as np
import pytest

from hpc3d.analyze.report.packed_steps import packed
from hpc3d.analyze.report.run_analysis import analyze_run
from tests.analyze.small import small


def unpacked(kind, text):
    size = int(kind[1:])
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), "u1").reshape(size, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"<{kind}")


@pytest.fixture(scope="module")
def chart(tmp_path_factory):
    with small(tmp_path_factory.mktemp("run") / "trace.h5") as trace:
        return analyze_run(trace).timeline


def test_packed_steps_preserve_times_and_names(chart):
    data = json.loads(json.dumps(packed([chart])))
    step = data["steps"][data["first"]]
    column = {key: unpacked(*data["pool"][place]) for key, place in step["columns"].items()}
    begun = np.cumsum(column["after"].astype("i8"))
    np.testing.assert_allclose(begun * step["tick"], chart.events["start"], atol=step["tick"])
    ended = begun + column["took"]
    np.testing.assert_allclose(ended * step["tick"], chart.events["end"], atol=2 * step["tick"])
    assert column["rank"].tolist() == [*chart.events["rank"]]


def test_identical_columns_of_several_steps_are_stored_once(chart):
    once, twice = packed([chart]), packed([chart, chart._replace(step=chart.step + 1)])
    assert len(twice["steps"]) == 2 and len(twice["pool"]) == len(once["pool"])
