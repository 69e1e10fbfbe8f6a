"""The data of a page's steps: what was packed is there again."""

import base64
import json
import zlib

import numpy as np

from hpc3d.analyze.report.page.packed_steps import packed
from hpc3d.analyze.report.run_analysis import analyze_run
from tests.analyze.small import small


def unpacked(pool, place):
    """An array of the pool, as page/steps.js reads it."""
    kind, text = pool[place]
    data = np.frombuffer(zlib.decompress(base64.b64decode(text)), "u1")
    return data.reshape(int(kind[1:]), -1).T.copy().view(f"<{kind}")[:, 0]


def steps(path):
    with small(path) as trace:
        chart = analyze_run(trace).timeline
    other = chart._replace(step=1)
    return chart, json.loads(json.dumps(packed([chart, other])))


def test_times_and_columns_are_those_of_the_timeline(tmp_path):
    chart, data = steps(tmp_path / "trace.h5")
    step = data["steps"][data["first"]]
    found = {key: unpacked(data["pool"], place) for key, place in step["columns"].items()}
    start = np.cumsum(found["after"])
    for key, ticks in (
        ("start", start),
        ("until", start + found["wait"]),
        ("end", start + found["took"]),
        ("posted", start - found["early"]),
    ):
        np.testing.assert_allclose(ticks * step["tick"], chart.events[key], atol=1e-3)
    np.testing.assert_array_equal(np.cumsum(found["seq"]), chart.events["seq"])
    for key in ("rank", "kind", "name", "bytes", "meeting", "by"):
        np.testing.assert_array_equal(found[key], chart.events[key])
    path = {key: unpacked(data["pool"], place) for key, place in step["path"].items()}
    np.testing.assert_array_equal(path["rank"][::2], [each.rank for each in chart.path])
    np.testing.assert_allclose(path["time"][1::2] * step["tick"], [e.end * 1e3 for e in chart.path])


def test_what_steps_have_in_common_is_there_once(tmp_path):
    _, data = steps(tmp_path / "trace.h5")
    one, other = data["steps"].values()
    assert one["columns"] == other["columns"] and one["path"] == other["path"]
