"""Columns of a trace, in NumPy and in pandas."""

import sys

import h5py
import numpy as np
import pytest

import hpc3d.trace
from hpc3d.trace import file, schema, table
from tests.trace.small import expected_events


def test_unknown_column_error_lists_the_known_ones(path):
    with (
        hpc3d.trace.open(path) as trace,
        pytest.raises(ValueError, match=r"/steps .* foo; .* rank, step, t_start"),
    ):
        trace.steps["foo"]


def test_table_missing_from_the_file_is_empty(path):
    with h5py.File(path, "r+") as file:
        del file["clock"]
    with hpc3d.trace.open(path) as trace:
        assert "rank" not in trace.clock_samples and len(trace.clock_samples) == 0
        assert trace.clock_samples["rank"].dtype == "i4"
        assert trace.clock_samples["rank"].tolist() == []
        assert trace.prediction["quantity"].tolist() == []


def test_columns_are_cached_while_kept(path, monkeypatch):
    read = []
    monkeypatch.setattr(table, "read", lambda *what: read.append(what[0].name) or real(*what))
    real = file.read
    with hpc3d.trace.open(path) as trace:
        expected = [trace.events[key].tolist() for key in ("dur", "rank")]
        read.clear()
        with trace.events.keeping():
            for _ in range(2):
                assert [trace.events[key].tolist() for key in ("dur", "rank")] == expected
            assert read == ["/events/dur", "/events/rank"]
            with pytest.raises(ValueError, match="read-only"):
                trace.events["dur"][0] = 1
            monkeypatch.setattr(table, "_KEPT", trace.events["dur"].nbytes)
            for key in ("rank", "dur", "dur"):
                trace.events[key]
            assert read[2:] == ["/events/dur"]
        trace.events["dur"][0] = 1
        assert len(read) == 4


def test_frame_replaces_codes_by_names(path):
    expected = expected_events()
    with hpc3d.trace.open(path) as trace:
        frame = trace.events.frame(["name", "op", "dur"])
        part = trace.events.frame(["phase"], trace.rows(1))
        assert [*trace.events.frame()] == [column.name for column in schema.EVENTS]
    assert frame["name"].tolist() == [row["name"] for row in expected]
    assert frame["op"].tolist() == [schema.OP[row["op"]] for row in expected]
    assert [*frame["op"].cat.categories] == [*schema.OP]
    assert frame["dur"].tolist() == [row["dur"] for row in expected]
    assert part["phase"].tolist() == [
        schema.PHASE[row["phase"]] for row in expected if row["rank"] == 1
    ]


def test_other_tables_convert_to_frames(path):
    with hpc3d.trace.open(path) as trace:
        ranks, memory = trace.ranks.frame(), trace.memory.frame(["kind", "peak"])
    assert ranks["host_id"].tolist() == ["node0", "node0", "node1", "node1"]
    assert ranks["coords"].tolist() == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    total = memory.groupby("kind", observed=True)["peak"].sum()
    assert total.to_dict() == {"parameter": 120, "gradient": 120, "optimizer": 120}


def test_frame_without_rows_has_its_columns(path):
    with hpc3d.trace.open(path) as trace:
        frame = trace.events.frame(["op", "name", "dur"], slice(0, 0))
    assert (len(frame), [*frame], [*frame["op"].cat.categories]) == (
        0,
        ["op", "name", "dur"],
        [*schema.OP],
    )


def test_frame_requires_pandas(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with hpc3d.trace.open(path) as trace:
        assert len(trace.events["dur"]) == 48
        with pytest.raises(ValueError, match="needs pandas: pip install pandas"):
            trace.events.frame()


def test_unknown_columns_are_ignored(path):
    with h5py.File(path, "r+") as file:
        file["events/color"] = np.zeros(3)
        file["events/elsewhere"] = h5py.SoftLink("/nowhere")
        file["calibration/melt/x/bytes"] = np.zeros(3)
    with hpc3d.trace.open(path) as trace:
        assert "color" not in trace.events
        assert len(trace.events["dur"]) == 48
        assert trace.calibration == {}
