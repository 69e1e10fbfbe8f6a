"""Opened traces: attributes, ranks, and the rows of one rank."""

import h5py
import pytest

import hpc3d.trace
from hpc3d.trace.merge import merge
from tests.trace import small
from tests.trace.large import generate
from tests.trace.small import AHEAD, SEGMENTS, expected_events, header


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


def test_run_folder_opens_its_trace(path, tmp_path_factory):
    for folder in (path.parent, str(path.parent)):
        with hpc3d.trace.open(folder) as trace:
            assert trace.path == path and len(trace.ranks) == 4
    unmerged = tmp_path_factory.mktemp("unmerged")
    with pytest.raises(ValueError, match=rf"{unmerged}: no trace\.h5; .*--merge"):
        hpc3d.trace.open(unmerged)


def test_rows_returns_the_rows_of_a_rank(path):
    with hpc3d.trace.open(path) as trace:
        for rank in range(4):
            mine = [row["count"] for row in expected_events() if row["rank"] == rank]
            assert trace.events["count", trace.rows(rank)].tolist() == mine
        for rank in (-1, 4):
            with pytest.raises(ValueError, match=f" 0 to 3, .*{rank}"):
                trace.rows(rank)


def test_rows_of_a_rank_are_read_without_those_of_others(tmp_path):
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


def test_file_older_than_evaluations_has_none(tmp_path):
    path = merge(small.write_all(tmp_path))
    with h5py.File(path, "r+") as file:
        del file["evaluation"]
    with hpc3d.trace.open(path) as trace:
        assert len(trace.evaluation) == 0 and trace.evaluation["loss"].tolist() == []
