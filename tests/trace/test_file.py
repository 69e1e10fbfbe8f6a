"""Segments, their merge and the reader, against expectations built row by row in Python."""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import hpc3d.trace
from hpc3d.trace import events as schema
from hpc3d.trace.merge import merge
from hpc3d.trace.segment import TABLES, replacing, segment_path, write_segment

RANKS = 4
SEGMENTS = 2
ROWS = 6
AHEAD = 7  # ns


def header(rank):
    """A 2 x 2 mesh: each rank knows its group along x and its group along y, in that order."""
    row, column = divmod(rank, 2)
    groups = [
        {"axis": "x", "members": [column, column + 2]},
        {"axis": "y", "members": [2 * row, 2 * row + 1]},
    ]
    return {
        "rank": rank,
        "world_size": RANKS,
        "axes": ["p", "x", "y"],
        "axis_sizes": [1, 2, 2],
        "coords": [0, row, column],
        "host": f"node{row}",
        "local_rank": column,
        "device": "cpu",
        "pid": 1000 + rank,
        "run_id": "run-1",
        "created_utc": "2025-01-02T03:04:05Z",
        "time_unit": "ns",
        "config": 'name = "small"\n[parallel]\nscheme = "2d"\n',
        "git": "0123abc",
        "mpi": "Open MPI 5",
        "version": "0.1.0",
        "dropped": 0,
        "groups": groups,
    }


def rows_of(rank, number):
    """The events of a segment as dicts: starts out of order, unlike names, the third nested.

    `count` is unique and so names a row wherever it goes.
    """
    generator = np.random.default_rng([rank, number])
    starts = generator.permutation(ROWS) * 100 + number * 1000
    return [
        {
            "t_start": int(starts[i]),
            "t_global": int(starts[i]) + AHEAD * (rank >= 2),
            "dur": int(generator.integers(1, 90)),
            "posted": int(starts[i]) - 5,
            "name": f"event {generator.integers(3)} of rank {rank}",
            "category": i % 8,
            "phase": i % 7,
            "op": i % 16,
            "rank": rank,
            "step": number,
            "microbatch": i,
            "stage": -1,
            "chunk": 1,
            "layer": i - 1,
            "stream": 2,
            "group": i % 3 - 1,
            "seq": i,
            "peer": 3 - rank,
            "bytes": 2**40 + i,
            "count": (rank * SEGMENTS + number) * ROWS + i,
            "dtype": i % 8,
            "flops": 0.5 * i,
            "parent": (ROWS - 1 if i == 2 else -1),
            "flags": i,
        }
        for i in range(ROWS)
    ]


def records(columns, rows):
    table = np.zeros(len(rows), schema.record_type(columns))
    for i, row in enumerate(rows):
        for key, value in row.items():
            table[key][i] = value
    return table


def steps_of(rank, number):
    values = range(number * 10 + rank, number * 10 + rank + len(schema.STEPS))
    row = dict(zip((column.name for column in schema.STEPS), values, strict=True))
    return [{**row, "rank": rank, "step": number}]


def memory_of(rank, number):
    return [
        {"rank": rank, "step": number, "kind": kind, "bytes": rank + kind, "peak": 10 * rank}
        for kind in range(3)
    ]


def samples_of(rank, number):
    """Rank 2 is the first of its host, whose clock is behind by AHEAD."""
    middle = {"t_local": 500, "offset_ns": AHEAD, "rtt_ns": 10, "round": number + 1, "peer": 0}
    return [{**middle, "rank": 2}] if rank == 2 else []


def write(run, rank, number, changes=None):
    """A segment whose table of names is its own: in the order of its own events."""
    rows = rows_of(rank, number)
    names = list(dict.fromkeys(row["name"] for row in rows))
    numbered = [{**row, "name": names.index(row["name"])} for row in rows]
    write_segment(
        segment_path(run, rank, number),
        header(rank) | (changes or {}),
        names,
        records(schema.EVENTS, numbered),
        records(schema.STEPS, steps_of(rank, number)),
        records(schema.MEMORY, memory_of(rank, number)),
        records(schema.CLOCK_SAMPLES, samples_of(rank, number)),
    )


@pytest.fixture
def run(tmp_path):
    for rank in range(RANKS):
        for number in range(SEGMENTS):
            write(tmp_path, rank, number)
    return tmp_path


def expected_events():
    every = [row for rank in range(RANKS) for n in range(SEGMENTS) for row in rows_of(rank, n)]
    return sorted(every, key=lambda row: (row["rank"], row["t_start"]))


def opened_events(run):
    """Columns as they are stored."""
    with hpc3d.trace.open(merge(run)) as trace:
        return {column.name: trace.events[column.name].tolist() for column in schema.EVENTS}


def test_events_are_sorted_and_keep_every_value(run):
    events, expected = opened_events(run), expected_events()
    for column in schema.EVENTS:
        if column.name not in ("name", "group", "parent"):
            assert events[column.name] == [row[column.name] for row in expected], column.name


def test_names_and_groups_of_all_ranks_are_in_one_table(run):
    with hpc3d.trace.open(merge(run)) as trace:
        names = [trace.strings[i] for i in trace.events["name"]]
        groups = [None if i < 0 else trace.groups[i] for i in trace.events["group"]]
        assert sorted(trace.groups) == [("x", (0, 2)), ("x", (1, 3)), ("y", (0, 1)), ("y", (2, 3))]
    for name, group, row in zip(names, groups, expected_events(), strict=True):
        own = header(row["rank"])["groups"][row["group"]] if row["group"] >= 0 else None
        assert name == row["name"]
        assert group == (own and (own["axis"], tuple(own["members"])))


def test_parents_follow_their_events(run):
    events = opened_events(run)
    # A parent is row 5 of the same segment, whose unique count is the child's row 2 and 3 more.
    for count, parent in zip(events["count"], events["parent"], strict=True):
        if count % ROWS == 2:
            assert events["count"][parent] == count + 3
        else:
            assert parent == -1


def test_of_two_events_with_one_start_the_enclosing_comes_first(tmp_path):
    rows = [
        {"t_start": 5, "dur": 2, "group": -1, "parent": 1},
        {"t_start": 5, "dur": 9, "group": -1, "parent": -1},
    ]
    events = records(schema.EVENTS, rows)
    empty = [records(columns, []) for columns in list(TABLES.values())[1:]]
    write_segment(segment_path(tmp_path, 0, 0), header(0), ["a"], events, *empty)
    events = opened_events(tmp_path)
    assert (events["dur"], events["parent"]) == ([9, 2], [-1, 0])


def test_steps_and_memory_keep_every_value(run):
    with hpc3d.trace.open(merge(run)) as trace:
        for table, columns, rows_of in (
            (trace.steps, schema.STEPS, steps_of),
            (trace.memory, schema.MEMORY, memory_of),
        ):
            rows = [
                row for rank in range(RANKS) for n in range(SEGMENTS) for row in rows_of(rank, n)
            ]
            for column in columns:
                assert table[column.name].tolist() == [row[column.name] for row in rows]


def test_attributes_ranks_and_index(run):
    with hpc3d.trace.open(merge(run)) as trace:
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
        assert trace.rank_ptr.tolist() == [0, 12, 24, 36, 48]
    with h5py.File(run / "trace.h5") as file:
        assert file["ranks/coords"][:].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
        assert file["clock/model/offset_ns"][:].tolist() == [0.0, 0.0, AHEAD, AHEAD]
        assert file["clock/samples/rank"][:].tolist() == [2] * SEGMENTS


def test_every_column_explains_itself_and_is_checked(run):
    columns = []
    with h5py.File(merge(run)) as file:
        file.visititems(lambda _, node: columns.append(node) if hasattr(node, "dtype") else None)
        assert {"/events/dur", "/groups/members", "/ranks/coords"} <= {c.name for c in columns}
        for column in columns:
            assert column.attrs["units"] and column.attrs["description"], column.name
            if h5py.check_string_dtype(column.dtype) is None:
                assert column.chunks[0] == 65536 and column.compression == "gzip"
                assert column.shuffle and column.fletcher32
        phases = h5py.check_enum_dtype(file["events/phase"].dtype)
    assert phases["forward"] == 0 and phases["other"] == 6


# What is missing


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    """In the middle of the events' values, where only the checksum notices."""
    content = bytearray(path.read_bytes())
    content[content.index(records(schema.EVENTS, rows_of_numbers(path))[0].tobytes()) + 50] ^= 4
    path.write_bytes(content)


def rows_of_numbers(path):
    with np.load(path) as arrays:
        table = arrays["events"]
    return [dict(zip(table.dtype.names, row, strict=True)) for row in table.tolist()]


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def pickle_it(path):
    np.savez(path, header=np.array([Trap(path.with_name("trap"))]))


def change_a_rank(path):
    with np.load(path) as arrays:
        content = dict(arrays)
    content["steps"]["rank"] = 3
    np.savez(path, **content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, change_a_rank, pickle_it, Path.unlink])
def test_a_damaged_segment_is_left_out_and_named(run, damage):
    damage(segment_path(run, 2, 0))
    with hpc3d.trace.open(merge(run)) as trace:
        assert trace.attrs["complete"] is False
        (line,) = trace.attrs["missing"].splitlines()
        assert line.startswith("rank 2: rank-00002-0000.npz cannot be read")
        assert trace.ranks["n_events"].tolist() == [12, 12, 6, 12]
        left = [row["count"] for row in expected_events() if (row["rank"], row["step"]) != (2, 0)]
        assert trace.events["count"].tolist() == left
        parents = trace.events["parent"]
        children = trace.events["count"] % ROWS == 2
        assert (trace.events["count"][parents[children]] % ROWS == ROWS - 1).all()
    assert not (run / "trace" / "trap").exists()


def test_a_missing_rank_is_named_and_has_no_rows(run):
    for number in range(SEGMENTS):
        segment_path(run, 1, number).unlink()
    with hpc3d.trace.open(merge(run)) as trace:
        assert (trace.attrs["complete"], trace.attrs["missing"]) == (False, "rank 1: no segment")
        assert trace.rank_ptr.tolist() == [0, 12, 12, 24, 36]
        assert trace.ranks["pid"].tolist() == [1000, -1, 1002, 1003]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dropped": 5}, "rank 3: 5 events, its buffer was full"),
        ({"run_id": "old"}, "rank 3: rank-00003-0001.npz belongs to another run"),
        ({"groups": []}, "rank 3: rank-00003-0001.npz cannot be read (its column group points"),
        ({"rank": 2}, "rank 3: rank-00003-0001.npz cannot be read (it has rows of other ranks"),
    ],
)
def test_what_does_not_fit_is_named(run, changes, line):
    write(run, 3, 1, changes)
    with hpc3d.trace.open(merge(run)) as trace:
        assert trace.attrs["missing"].startswith(line)
        assert not trace.attrs["complete"]


def test_a_rank_that_ends_early_is_named(run):
    segment_path(run, 3, 1).unlink()
    with hpc3d.trace.open(merge(run)) as trace:
        assert trace.attrs["missing"] == "rank 3: nothing after step 0"


def test_without_a_readable_segment_the_old_trace_stays(run):
    old = merge(run).read_bytes()
    for path in (run / "trace").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no segment of the trace can be read: rank 0"):
        merge(run)
    assert (run / "trace.h5").read_bytes() == old
    assert [path.name for path in run.iterdir() if path.suffix == ".tmp"] == []


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no trace; set enabled = true"):
        merge(tmp_path)


def test_a_segment_is_whole_or_absent(tmp_path, monkeypatch):
    def fill_the_disk(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fill_the_disk)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, 0, 0)
    assert list((tmp_path / "trace").iterdir()) == []


def test_a_broken_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# A file that is not trusted


def newer(file, _):
    file.attrs["version"] = 2


def external_link(file, other):
    replace(file, h5py.ExternalLink(other, "/events/dur"))


def soft_link(file, _):
    replace(file, h5py.SoftLink("/events/t_start"))


def replace(file, link):
    del file["events/dur"]
    file["events/dur"] = link


def external_storage(file, other):
    del file["events/dur"]
    file.create_dataset("events/dur", (48,), "i8", external=[(other, 0, 48 * 8)])


def virtual(file, other):
    del file["events/dur"]
    layout = h5py.VirtualLayout((48,), "i8")
    layout[:] = h5py.VirtualSource(other, "events/dur", (48,))
    file.create_virtual_dataset("events/dur", layout)


def huge(file, _):
    for column in file["events"].values():
        column.resize((2**50,))


def uneven(file, _):
    file["events/dur"].resize((47,))


def two_dimensional(file, _):
    del file["events/dur"]
    file["events/dur"] = np.zeros((48, 1), "i8")


def other_type(file, _):
    del file["events/dur"]
    file["events/dur"] = np.zeros(48)


def linked_group(file, other):
    del file["events"]
    file["events"] = h5py.ExternalLink(other, "/events")


def absent_column(file, _):
    del file["events/dur"]


def absent_attribute(file, _):
    del file.attrs["missing"]
    file.attrs["world_size"] = "4"


def other_format(file, _):
    file.attrs["format"] = "something"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (newer, "version 2, this hpc3d reads up to 1; update"),
        (other_format, "not an hpc3d trace"),
        (absent_attribute, "attributes world_size, missing are damaged"),
        (external_link, "dur is a link to elsewhere"),
        (soft_link, "dur is a link to elsewhere"),
        (linked_group, "events is a link to elsewhere"),
        (external_storage, "dur is not data of this file"),
        (virtual, "dur is not data of this file"),
        (huge, r"has the shape \(1125899906842624,\), not one that fits memory"),
        (two_dimensional, r"dur has the shape \(48, 1\)"),
        (uneven, "columns of different lengths"),
        (other_type, "dur has the type float64, not i8"),
        (absent_column, "the column dur is missing"),
    ],
)
def test_an_unsound_file_is_refused(run, tmp_path, spoil, reason):
    path = merge(run)
    other = tmp_path / "other.h5"
    other.write_bytes(path.read_bytes())
    with h5py.File(path, "r+") as file:
        spoil(file, other)
    with pytest.raises(ValueError, match=reason) as refusal, hpc3d.trace.open(path) as trace:
        trace.events["dur"]
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_damaged_value_is_refused(run):
    path = merge(run)
    with h5py.File(path) as file:
        chunk = file["events/dur"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + chunk.size // 2] ^= 1
    path.write_bytes(content)
    with hpc3d.trace.open(path) as trace:
        assert len(trace.events["t_start"]) == 48
        with pytest.raises(ValueError, match=r"trace\.h5: .*--merge"):
            trace.events["dur"]


def test_a_truncated_file_is_refused(run):
    path = merge(run)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"trace\.h5: .*--merge"):
        hpc3d.trace.open(path)


def test_unknown_columns_are_ignored(run):
    path = merge(run)
    with h5py.File(path, "r+") as file:
        file["events/colour"] = np.zeros(3)
        file["events/elsewhere"] = h5py.SoftLink("/nowhere")
    with hpc3d.trace.open(path) as trace:
        assert "colour" not in trace.events
        assert len(trace.events["dur"]) == 48


def test_a_recording_rank_needs_no_h5py():
    program = "import hpc3d.trace, hpc3d.trace.segment, sys; print('h5py' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
