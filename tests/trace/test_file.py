"""The trace file: it explains itself, and its reader gives NumPy and pandas."""

import subprocess
import sys

import h5py
import numpy as np
import pytest

import hpc3d.trace
from hpc3d.trace import schema
from hpc3d.trace.annotations import Calibration, write_calibration, write_prediction
from hpc3d.trace.merge import merge
from tests.trace.large import generate
from tests.trace.small import AHEAD, SEGMENTS, expected_events, header, write_all


@pytest.fixture
def path(tmp_path):
    return merge(write_all(tmp_path))


def test_attributes_ranks_and_index(path):
    with hpc3d.trace.open(path) as trace:
        expected = {
            "format": "hpc3d-trace",
            "version": 1,
            "kind": "measured",
            "run_id": "run-1",
            "world_size": 4,
            "axes": "p x y",
            "axis_sizes": [1, 2, 2],
            "time_unit": "ns",
            "config": header(0)["config"],
            "complete": True,
            "missing": "",
        }
        assert expected.items() <= trace.attrs.items()
        assert [trace.strings[i] for i in trace.ranks["host_id"]] == ["node0"] * 2 + ["node1"] * 2
        assert trace.ranks["pid"].tolist() == [1000, 1001, 1002, 1003]
        assert trace.ranks["n_events"].tolist() == [12] * 4
        assert trace.ranks["coords"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
        assert trace.rank_ptr.tolist() == [0, 12, 24, 36, 48]
        assert trace.clock_model["offset_ns"].tolist() == [0.0, 0.0, AHEAD, AHEAD]
        assert trace.clock_samples["rank"].tolist() == [2] * SEGMENTS


def test_a_run_folder_stands_for_its_trace(path, tmp_path_factory):
    for folder in (path.parent, str(path.parent)):
        with hpc3d.trace.open(folder) as trace:
            assert trace.path == path and len(trace.ranks) == 4
    unmerged = tmp_path_factory.mktemp("unmerged")
    with pytest.raises(ValueError, match=rf"{unmerged}: no trace\.h5; .*--merge"):
        hpc3d.trace.open(unmerged)


def test_a_column_that_no_trace_has_is_named_with_those_that_are(path):
    with (
        hpc3d.trace.open(path) as trace,
        pytest.raises(ValueError, match=r"/steps .* foo; .* rank, step, t_start"),
    ):
        trace.steps["foo"]


def test_a_table_that_the_file_lacks_is_empty(path):
    with h5py.File(path, "r+") as file:
        del file["clock"]
    with hpc3d.trace.open(path) as trace:
        assert "rank" not in trace.clock_samples and len(trace.clock_samples) == 0
        assert trace.clock_samples["rank"].dtype == "i4"
        assert trace.clock_samples["rank"].tolist() == []
        assert trace.prediction["quantity"].tolist() == []


def test_everything_in_the_file_explains_itself(path):
    write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED)
    found = []
    with h5py.File(path) as file:
        file.visititems(lambda _, node: found.append(node))
        for node in (file, *found):
            assert node.attrs["description"], node.name
        columns = [node for node in found if isinstance(node, h5py.Dataset)]
        for column in columns:
            assert column.attrs["units"], column.name
            if h5py.check_string_dtype(column.dtype) is None:
                assert column.chunks[0] == 65536 and column.compression == "gzip"
                assert column.shuffle and column.fletcher32
        phases = h5py.check_enum_dtype(file["events/phase"].dtype)
        assert {column.name for column in columns} == defined()
    assert phases["forward"] == 0 and phases["other"] == 6


def defined():
    """The paths of all columns of the definitions, for the calibrations of MEASURED."""
    paths = set()
    for op, axis in MEASURED:
        for table, (_, columns) in schema.LAYOUT.items():
            table = table.replace("<op>", op).replace("<axis>", axis)
            paths |= {f"/{table}/{column.name}" for column in columns}
    return paths


# NumPy and pandas


def test_the_rows_of_a_rank(path):
    with hpc3d.trace.open(path) as trace:
        for rank in range(4):
            mine = [row["count"] for row in expected_events() if row["rank"] == rank]
            assert trace.events["count", trace.rows(rank)].tolist() == mine
        for rank in (-1, 4):
            with pytest.raises(ValueError, match=f" 0 to 3, .*{rank}"):
                trace.rows(rank)


def test_rows_are_read_without_those_of_other_ranks(tmp_path):
    """The chunk with the rows of rank 2 is damaged."""
    generate(tmp_path, (3, 1, 1, 1), 110, 600)
    path = merge(tmp_path)
    with h5py.File(path) as file:
        chunk = file["events/dur"].id.get_chunk_info(2)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + chunk.size // 2] ^= 1
    path.write_bytes(content)
    with hpc3d.trace.open(path) as trace:
        assert len(trace.events["dur", trace.rows(0)]) == 66000
        with pytest.raises(ValueError, match="filter returned failure"):
            trace.events["dur", trace.rows(2)]


def test_a_frame_has_names_in_place_of_numbers(path):
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


def test_other_tables_are_frames_too(path):
    with hpc3d.trace.open(path) as trace:
        ranks, memory = trace.ranks.frame(), trace.memory.frame(["kind", "peak"])
    assert ranks["host_id"].tolist() == ["node0", "node0", "node1", "node1"]
    assert ranks["coords"].tolist() == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    total = memory.groupby("kind", observed=True)["peak"].sum()
    assert total.to_dict() == {"parameter": 120, "gradient": 120, "optimizer": 120}


def test_a_frame_of_no_rows_has_its_columns(path):
    with hpc3d.trace.open(path) as trace:
        frame = trace.events.frame(["op", "name", "dur"], slice(0, 0))
    assert (len(frame), [*frame], [*frame["op"].cat.categories]) == (
        0,
        ["op", "name", "dur"],
        [*schema.OP],
    )


def test_without_pandas_there_is_no_frame(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with hpc3d.trace.open(path) as trace:
        assert len(trace.events["dur"]) == 48
        with pytest.raises(ValueError, match=r"pandas: pip install 'hpc3d\[report\]'"):
            trace.events.frame()


def test_unknown_columns_are_ignored(path):
    with h5py.File(path, "r+") as file:
        file["events/colour"] = np.zeros(3)
        file["events/elsewhere"] = h5py.SoftLink("/nowhere")
        file["calibration/melt/x/bytes"] = np.zeros(3)
    with hpc3d.trace.open(path) as trace:
        assert "colour" not in trace.events
        assert len(trace.events["dur"]) == 48
        assert trace.calibration == {}


def test_a_recording_rank_needs_no_h5py():
    program = "import hpc3d.trace, hpc3d.trace.segment, sys; print('h5py' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


# Calibration and prediction


def calibration(first, alpha):
    rows = {"bytes": [first, 2 * first], "t_min": [0.1, 0.2], "t_median": [0.2, 0.3]}
    return Calibration({**rows, "t_p95": [0.25, 0.35], "reps": [100, 50]}, alpha, 1e-9)


MEASURED = {("all_gather", "x"): calibration(64, 2e-6), ("send", "p"): calibration(8, 3e-6)}
PREDICTED = {
    "step": [-1, 4],
    "quantity": ["step_s", "peak_bytes"],
    "stage": [-1, 1],
    "rank": [-1, 3],
    "value": [0.25, 1e9],
}


def supplements(path):
    """What a file has of both, as plain values."""
    with hpc3d.trace.open(path) as trace:
        measured = {
            key: (
                {name: values.tolist() for name, values in table.columns().items()},
                table.attrs["alpha"],
                table.attrs["beta"],
            )
            for key, table in trace.calibration.items()
        }
        predicted = {name: values.tolist() for name, values in trace.prediction.columns().items()}
        assert len(trace.events["dur"]) == 48
    return measured, predicted


def test_a_file_without_them_has_none(path):
    assert supplements(path) == ({}, {})


def test_they_are_added_and_replaced(path):
    write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED)
    assert supplements(path) == (MEASURED, PREDICTED)
    newer = {("send", "p"): calibration(16, 4e-6), ("recv", "p"): calibration(32, 5e-6)}
    write_calibration(path, newer)
    write_prediction(path, {name: values[:1] for name, values in PREDICTED.items()})
    measured, predicted = supplements(path)
    assert measured == MEASURED | newer
    assert predicted == {name: values[:1] for name, values in PREDICTED.items()}


@pytest.mark.parametrize("key", [("melt", "x"), ("send", ""), ("send", "x/y"), ("send", "..")])
def test_a_calibration_of_nothing_is_refused(path, key):
    with pytest.raises(ValueError, match=r"operation .* axis"):
        write_calibration(path, {key: calibration(8, 1e-6)})


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({"step": [1]}, ".*quantity, stage, rank, value"),
        (PREDICTED | {"value": [1.0]}, ".*lengths"),
        (PREDICTED | {"value": ["fast", "slow"]}, "could not convert"),
    ],
)
def test_the_file_stays_as_it_was_if_they_cannot_be_written(path, rows, reason):
    old = path.read_bytes()
    with pytest.raises(ValueError, match=rf"trace\.h5: {reason}.*; nothing was written"):
        write_prediction(path, rows)
    assert path.read_bytes() == old
    assert not [*path.parent.glob("*.tmp")]


@pytest.mark.parametrize("link", [h5py.SoftLink("/events"), h5py.ExternalLink("other.h5", "/")])
def test_nothing_is_written_through_a_link(path, link):
    other = path.with_name("other.h5")
    other.write_bytes(path.read_bytes())
    with h5py.File(path, "r+") as file:
        file["calibration"] = file["prediction"] = link
    old = other.read_bytes()
    with pytest.raises(ValueError, match=r"calibration .*link"):
        write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED)  # in place of the link
    assert other.read_bytes() == old
    with hpc3d.trace.open(path) as trace:
        assert trace.prediction["value"].tolist() == PREDICTED["value"]


def test_a_merge_keeps_those_of_its_run(path):
    write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED)
    merge(path.parent)
    assert supplements(path) == (MEASURED, PREDICTED)
    with h5py.File(path, "r+") as file:
        file.attrs["run_id"] = "another"
    merge(path.parent)
    assert supplements(path) == ({}, {})
