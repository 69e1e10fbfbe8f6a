"""Segments and their merged trace, compared with rows built in Python."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.analyze.metrics.columns import hosts
from hpc3d.runtime import metrics_file
from hpc3d.trace import schema
from hpc3d.trace.merge import merge
from hpc3d.trace.segment import TABLES, segment_path, write_segment
from tests.elided import elided
from tests.trace.small import (
    AHEAD,
    RANKS,
    ROWS,
    SEGMENTS,
    expected_events,
    header,
    memory_of,
    records,
    steps_of,
    write,
    write_all,
)


@pytest.fixture
def run(tmp_path):
    return write_all(tmp_path)


def opened_events(run):
    """Return the columns as they are stored."""
    with hpc3d.trace.open(merge(run)) as trace:
        return {column.name: trace.events[column.name].tolist() for column in schema.EVENTS}


def test_events_are_sorted_and_keep_every_value(run):
    events, expected = opened_events(run), expected_events()
    for column in schema.EVENTS:
        if column.name not in ("name", "group", "parent"):
            assert events[column.name] == [row[column.name] for row in expected], column.name


def test_hosts_with_the_same_name_have_separate_clocks(run):
    """Ranks are assigned to nodes, and all hosts have the same name."""
    for rank in range(RANKS):
        for number in range(SEGMENTS):
            write(run, rank, number, {"host": "twin", "node": rank // 2 * 2})
    times = [row["t_global"] for row in expected_events()]
    assert opened_events(run)["t_global"] == times
    with hpc3d.trace.open(run / "trace.h5") as trace:
        assert {trace.strings[host] for host in trace.ranks["host_id"]} == {"twin"}
        assert "clock" not in trace.attrs["missing"]
        ahead = {*zip(trace.clock_model["rank"].tolist(), trace.clock_model["offset_ns"].tolist())}
        assert ahead == {(0, 0), (1, 0), (2, AHEAD), (3, AHEAD)}


def test_names_and_groups_of_all_ranks_share_one_table(run):
    with hpc3d.trace.open(merge(run)) as trace:
        names = [trace.strings[i] for i in trace.events["name"]]
        groups = [None if i < 0 else trace.groups[i] for i in trace.events["group"]]
        assert sorted(trace.groups) == [("x", (0, 2)), ("x", (1, 3)), ("y", (0, 1)), ("y", (2, 3))]
    for name, group, row in zip(names, groups, expected_events(), strict=True):
        own = header(row["rank"])["groups"][row["group"]] if row["group"] >= 0 else None
        assert name == row["name"]
        assert group == (own and (own["axis"], tuple(own["members"])))


def test_parent_indices_follow_their_events(run):
    events = opened_events(run)
    # A parent is row 5 of the same segment, whose unique count is the child's row 2 and 3 more.
    for count, parent in zip(events["count"], events["parent"], strict=True):
        if count % ROWS == 2:
            assert events["count"][parent] == count + 3
        else:
            assert parent == -1


def test_enclosing_event_precedes_a_nested_one_with_the_same_start(tmp_path):
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


# What is missing


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    """Flip a bit in the middle of the events, which only the checksum detects."""
    content = bytearray(path.read_bytes())
    content[content.index(records(schema.EVENTS, rows_of_numbers(path))[0].tobytes()) + 50] ^= 4
    path.write_bytes(content)


def rows_of_numbers(path):
    with np.load(path) as arrays:
        table = arrays["events"]
    return [dict(zip(table.dtype.names, row, strict=True)) for row in table.tolist()]


class Trap:
    """Object that creates a file when it is unpickled."""

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
def test_damaged_segment_is_skipped_and_named(run, damage):
    damage(segment_path(run, 2, 0))
    with hpc3d.trace.open(merge(run)) as trace:
        assert trace.attrs["complete"] is False
        first, second = trace.attrs["missing"].splitlines()
        assert first.startswith("rank 2: rank-00002-0000.npz ")
        assert second == "rank 2: step 0"
        assert trace.ranks["n_events"].tolist() == [12, 12, 6, 12]
        left = [row["count"] for row in expected_events() if (row["rank"], row["step"]) != (2, 0)]
        assert trace.events["count"].tolist() == left
        parents = trace.events["parent"]
        children = trace.events["count"] % ROWS == 2
        assert (trace.events["count"][parents[children]] % ROWS == ROWS - 1).all()
    assert not (run / "trace" / "trap").exists()


def test_missing_rank_is_named_and_has_no_rows(run):
    for number in range(SEGMENTS):
        segment_path(run, 1, number).unlink()
    with hpc3d.trace.open(merge(run)) as trace:
        assert trace.attrs["complete"] is False
        assert re.fullmatch("rank 1: .*segment", trace.attrs["missing"])
        assert trace.rank_ptr.tolist() == [0, 12, 12, 24, 36]
        assert trace.ranks["pid"].tolist() == [1000, -1, 1002, 1003]


@pytest.mark.parametrize("known", [{"ranks": [{"host": f"host-{n}"} for n in "0123"]}, [], None])
def test_missing_rank_has_the_host_in_the_environment_of_the_run(run, known):
    for number in range(SEGMENTS):
        segment_path(run, 1, number).unlink()
    (run / "environment.json").write_text(json.dumps(known))
    with hpc3d.trace.open(merge(run)) as trace:
        names = [*hosts(trace).values()]
    assert names[1] == ("host-1" if known else None) and None not in (names[0], *names[2:])


def test_missing_ranks_are_named_first(run):
    segment_path(run, 0, 1).unlink()
    for number in range(SEGMENTS):
        segment_path(run, 3, number).unlink()
    with hpc3d.trace.open(merge(run)) as trace:
        first, *_ = trace.attrs["missing"].splitlines()
    assert first == "rank 3: no segment"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dropped": 5}, "rank 3: 5 events ... full"),
        ({"run_id": "old"}, "rank 3: rank-00003-0001.npz ... run"),
        ({"world_size": 8}, "rank 3: rank-00003-0001.npz ... run"),
        ({"groups": []}, "rank 3: rank-00003-0001.npz ...(... column group "),
        ({"rank": 2}, "rank 3: rank-00003-0001.npz ...(... rows ... ranks "),
        (
            {"groups": [{"axis": "x", "members": [3, 4]}] * 2},
            "rank 3: rank-00003-0001.npz ... ranks beyond rank 3",
        ),
    ],
)
def test_inconsistent_segment_is_named(run, changes, line):
    write(run, 3, 1, changes)
    with hpc3d.trace.open(merge(run)) as trace:
        assert re.match(elided(line), trace.attrs["missing"])
        assert not trace.attrs["complete"]


def test_incomplete_segment_header_is_named(run):
    path = segment_path(run, 3, 1)
    with np.load(path) as arrays:
        content = dict(arrays)
    known = json.loads(content["header"].tobytes())
    del known["host"], known["mpi"]
    np.savez(path, **content | {"header": np.frombuffer(json.dumps(known).encode(), "u1")})
    with hpc3d.trace.open(merge(run)) as trace:
        lines = trace.attrs["missing"].splitlines()
    header, last = lines
    assert re.fullmatch(elided("rank 3: rank-00003-0001.npz ... header ... mpi, host"), header)
    assert re.fullmatch(elided("rank 3: ... after step 0"), last)


def test_incomplete_step_is_named(run):
    """Rank 3 began step 1, like the other ranks, but did not complete it."""
    path = segment_path(run, 3, 1)
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez(path, **content | {"steps": content["steps"][:0]})
    with hpc3d.trace.open(merge(run)) as trace:
        assert re.fullmatch("rank 3: .* after step 0", trace.attrs["missing"])
    for rank in range(3):
        path = segment_path(run, rank, 1)
        with np.load(path) as arrays:
            content = dict(arrays)
        np.savez(path, **content | {"steps": content["steps"][:0]})
    with hpc3d.trace.open(merge(run)) as trace:
        facts = "\n".join(f"rank {rank}: .* step 1" for rank in range(RANKS))
        assert re.fullmatch(facts, trace.attrs["missing"])
        assert not trace.attrs["complete"]


@pytest.mark.parametrize("ranks", [(3,), range(RANKS)], ids=str)
def test_step_without_events_is_complete(run, ranks):
    """The events of step 1 were omitted; the row of the step shows that it was completed."""
    for rank in ranks:
        path = segment_path(run, rank, 1)
        with np.load(path) as arrays:
            content = dict(arrays)
        np.savez(path, **content | {"events": content["events"][:0]})
    with hpc3d.trace.open(merge(run)) as trace:
        assert trace.attrs["missing"] == ""
        assert trace.attrs["complete"]


@pytest.mark.parametrize(
    ("kind", "steps", "trained", "missing"),
    [
        ("measured", 2, 2, ""),
        ("measured", 5, 2, "steps from 2 ... not trained... completed 2 of 5 steps"),
        ("measured", 4, 4, "steps 2 to 3: trained, but not in any segment of the trace"),
        ("simulated", 5, 0, ""),
        ("measured", '"many"', 0, ""),
    ],
)
def test_run_that_ended_early_is_incomplete(tmp_path, kind, steps, trained, missing):
    """All ranks agree that the trace has only steps 0 and 1; metrics.jsonl has `trained` steps."""
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(trained)]
    (tmp_path / metrics_file.NAME).write_text("".join(lines))
    for rank, number in product(range(RANKS), range(SEGMENTS)):
        write(tmp_path, rank, number, {"kind": kind, "config": f"[train]\nsteps = {steps}\n"})
    with hpc3d.trace.open(merge(tmp_path)) as trace:
        assert re.fullmatch(elided(missing), trace.attrs["missing"])
        assert trace.attrs["complete"] == (not missing)


def test_rank_that_ended_early_is_named_after_the_missing_steps_of_all_ranks(run):
    segment_path(run, 3, 1).unlink()
    with hpc3d.trace.open(merge(run)) as trace:
        assert re.fullmatch("rank 3: .* after step 0", trace.attrs["missing"])
    (run / metrics_file.NAME).write_text('{"step": 9, "loss": 1.0}\n')
    with hpc3d.trace.open(merge(run)) as trace:
        assert re.fullmatch("step 9: .*\nrank 3: .* after step 0", trace.attrs["missing"])


def test_merge_reports_the_last_complete_step_of_each_rank(tmp_path):
    for rank in range(RANKS):
        for number in range(8):
            write(tmp_path, rank, number)
    lost = {0: (7,), 1: (2, 3, 5), 2: range(8)}
    for rank, numbers in lost.items():
        for number in numbers:
            segment_path(tmp_path, rank, number).unlink()
    with hpc3d.trace.open(merge(tmp_path)) as trace:
        lines = trace.attrs["missing"].splitlines()
        steps = [trace.steps["step"][trace.steps["rank"] == rank] for rank in range(RANKS)]
    facts = [
        "rank 2: ... segment",
        *(
            f"rank 1: rank-00001-000{number}.npz ... (No such file or directory)"
            for number in lost[1]
        ),
        "rank 0: ... after step 6",
        "rank 1: steps 2 to 3, 5",
        "rank 3: ... clock ... rank 0...",
    ]
    assert re.fullmatch("\n".join(map(elided, facts)), "\n".join(lines))
    assert [each.tolist() for each in steps] == [[*range(7)], [0, 1, 4, 6, 7], [], [*range(8)]]


def test_segments_of_another_run_are_rejected(run):
    """Two ranks belong to another run; one of them from its first segment on."""
    for rank, numbers in {1: (0, 1), 3: (1,)}.items():
        for number in numbers:
            write(run, rank, number, {"run_id": "run-2"})
    with hpc3d.trace.open(merge(run)) as trace:
        assert trace.attrs["run_id"] == "run-1"
        facts = [
            "rank 1: ... segment",
            "rank 1: rank-00001-0000.npz ... run",
            "rank 1: rank-00001-0001.npz ... run",
            "rank 3: rank-00003-0001.npz ... run",
            "rank 3: ... after step 0",
        ]
        assert re.fullmatch("\n".join(map(elided, facts)), trace.attrs["missing"])
        assert trace.ranks["n_events"].tolist() == [12, 0, 12, 6]


def test_rank_beyond_the_world_size_is_named(run):
    write(run, 4, 0)
    with hpc3d.trace.open(merge(run)) as trace:
        line = r"rank 4: rank-00004-0000\.npz .* beyond rank 3"
        assert re.fullmatch(line, trace.attrs["missing"])
        assert len(trace.events["rank"]) == trace.rank_ptr[-1] == 48


def test_old_trace_is_kept_if_no_segment_is_readable(run):
    old = merge(run).read_bytes()
    for path in (run / "trace").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no segment .*: rank 0"):
        merge(run)
    assert (run / "trace.h5").read_bytes() == old
    assert [path.name for path in run.iterdir() if path.suffix == ".tmp"] == []


def test_folder_without_a_trace_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: .*segments"):
        merge(tmp_path)
