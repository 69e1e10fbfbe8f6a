"""Export to the Trace Event Format, which Perfetto reads."""

import json
from collections import defaultdict

import pytest

from hpc3d.analyze.export import perfetto
from tests.analyze.export.exported import exported
from tests.analyze.small import ROWS, small


def slices(lines):
    """Return a dict from (process, thread) to its sorted list of (start, end, name)."""
    found = defaultdict(list)
    for line in lines:
        if line["ph"] == "X":
            place = line["pid"], line["tid"]
            found[place].append((line["ts"], line["ts"] + line["dur"], line["name"]))
    return {
        place: sorted(each, key=lambda one: (one[0], -one[1])) for place, each in found.items()
    }


def arrows(lines):
    """Return the lines of the start and the end of each arrow, by id."""
    ends = defaultdict(dict)
    for line in lines:
        if line["ph"] in "sf":
            assert line["ph"] not in ends[line["id"]], "an arrow with two starts or ends"
            ends[line["id"]][line["ph"]] = line
    return [(each["s"], each["f"]) for each in ends.values()]


def written(trace, folder):
    path = perfetto.write(exported(trace), folder)
    return json.loads(path.read_text())


def test_perfetto_lines_have_the_fields_that_the_format_requires(trace, tmp_path):
    found = written(trace, tmp_path)
    assert found.keys() == {"displayTimeUnit", "traceEvents"}
    kinds = {"X": {"ts", "dur", "cat", "args"}, "M": {"args"}}
    kinds |= {"s": {"ts", "cat", "id"}, "f": {"ts", "cat", "id", "bp"}}
    for line in found["traceEvents"]:
        assert line.keys() == {"name", "ph", "pid", "tid"} | kinds[line["ph"]]
        assert isinstance(line["name"], str)
        assert all(isinstance(line[key], int) for key in ("pid", "tid"))
        assert all(isinstance(line[key], int | float) for key in ("ts", "dur") if key in line)
        assert line.get("dur", 0) >= 0


def test_perfetto_slices_of_a_thread_nest(trace, tmp_path):
    lines = written(trace, tmp_path)["traceEvents"]
    for each in slices(lines).values():
        open_until = []
        for start, end, _ in each:
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)
    events = [line for line in lines if line["ph"] == "X" and line["cat"] != "step"]
    assert len(events) == len(trace.events)
    total = sum(line["dur"] for line in events) * 1e3
    assert total == pytest.approx(trace.events["dur"].sum())


def test_perfetto_arrows_start_and_end_in_slices_and_point_forward(trace, tmp_path):
    lines = written(trace, tmp_path)["traceEvents"]
    found = slices(lines)
    assert len(arrows(lines)) > 0
    for start, end in arrows(lines):
        assert start["ts"] <= end["ts"] and end["bp"] == "e"
        for line in (start, end):
            inside = [
                begin <= line["ts"] + 1e-6 and line["ts"] <= until
                for begin, until, _ in found[line["pid"], line["tid"]]
            ]
            assert any(inside)


def test_perfetto_slices_state_op_axis_bytes_and_wait_time(hand, tmp_path):
    lines = written(hand, tmp_path)["traceEvents"]
    gather = next(each for each in lines if each["name"] == "event" and each["ts"] == 4000)
    assert (gather["pid"], gather["dur"], gather["cat"]) == (0, 2000, "comm")
    wanted = {"op": "all_gather", "axis": "x", "bytes": 1000, "wait_us": 1000, "posted_us": 4000}
    assert wanted.items() <= gather["args"].items()
    names = [each["args"]["name"] for each in lines if each["name"] == "process_name"]
    assert names == ["rank 0 (x=0), node0", "rank 1 (x=1), node1"]
    found = {
        (start["name"], start["pid"], start["ts"], end["pid"], end["ts"])
        for start, end in arrows(lines)
    }
    assert found == {("all_gather", 1, 5000, 0, 5999.999), ("recv", 1, 8000, 0, 8999.999)}
    steps = [each for each in lines if each.get("cat") == "step"]
    assert [(each["name"], each["pid"], each["ts"], each["dur"]) for each in steps] == [
        ("step 0", rank, 0, 10000) for rank in (0, 1)
    ]


def test_perfetto_omits_arrows_and_waits_if_ranks_record_cpu_time(tmp_path):
    with small(tmp_path / "trace.h5", config='[trace]\nclock = "cpu"\n') as trace:
        lines = written(trace, tmp_path)["traceEvents"]
    names = [each["args"]["name"] for each in lines if each["name"] == "process_name"]
    assert names[0] == "rank 0 (x=0), node0, CPU time of this rank"
    assert sum(line["ph"] == "X" for line in lines) == len(ROWS) + 2
    assert not arrows(lines) and not any("wait_us" in line.get("args", {}) for line in lines)


def test_perfetto_arrows_join_each_receive_to_its_send(real, tmp_path):
    """Each receive has one arrow, from the send with the same number on the peer rank."""
    lines = written(real, tmp_path)["traceEvents"]
    received = [each for each in lines if each["name"] == "recv" and each.get("cat") == "comm"]
    found = [(start, end) for start, end in arrows(lines) if end["name"] == "recv"]
    assert len(found) == len(received) > 0
    peers = {(each["pid"], each["ts"] + each["dur"]): each["args"]["peer"] for each in received}
    for start, end in found:
        (peer,) = [
            peer
            for (rank, until), peer in peers.items()
            if rank == end["pid"] and abs(until - end["ts"]) < 2e-3
        ]
        assert start["pid"] == peer
