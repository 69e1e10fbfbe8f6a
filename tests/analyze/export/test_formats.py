"""Events as other programs read them, against their formats as these describe them."""

import csv
import json
import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from hpc3d import report
from hpc3d.analyze.export import kineto, perfetto, pipit
from hpc3d.analyze.export.formats import events_of, export
from hpc3d.analyze.metrics.wait_states import calls_of
from tests.analyze.naps import trained
from tests.analyze.small import GROUPS, ROWS, small
from tests.analyze.synthetic import by_hand, call, row

PIPELINE = {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 4, "parallel__schedule": "1f1b"}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A pipeline of 2 stages, with messages, on 4 ranks."""
    with trained(tmp_path_factory.mktemp("real") / "run", 4, **PIPELINE) as trace:
        yield trace


@pytest.fixture(scope="module")
def hand(tmp_path_factory):
    with small(tmp_path_factory.mktemp("hand") / "trace.h5") as trace:
        yield trace


@pytest.fixture(params=["hand", "real"])
def trace(request):
    return request.getfixturevalue(request.param)


def exported(trace, **steps):
    return events_of(trace, calls_of(trace), **steps)


# Perfetto: the Trace Event Format


def slices(lines):
    """{(process, thread): [(start, end, name)] in order}."""
    found = defaultdict(list)
    for line in lines:
        if line["ph"] == "X":
            place = line["pid"], line["tid"]
            found[place].append((line["ts"], line["ts"] + line["dur"], line["name"]))
    return {
        place: sorted(each, key=lambda one: (one[0], -one[1])) for place, each in found.items()
    }


def arrows(lines):
    """(line of the start, line of the end) by id."""
    ends = defaultdict(dict)
    for line in lines:
        if line["ph"] in "sf":
            assert line["ph"] not in ends[line["id"]], "an arrow with two starts or ends"
            ends[line["id"]][line["ph"]] = line
    return [(each["s"], each["f"]) for each in ends.values()]


def written(trace, folder):
    path = perfetto.write(exported(trace), folder)
    return json.loads(path.read_text())


def test_perfetto_lines_have_what_the_format_demands(trace, tmp_path):
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


def test_perfetto_arrows_lie_in_slices_and_point_forward(trace, tmp_path):
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


def test_perfetto_says_where_who_and_for_whom(hand, tmp_path):
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


def test_processor_times_of_ranks_are_not_compared(tmp_path):
    with small(tmp_path / "trace.h5", config='[trace]\nclock = "cpu"\n') as trace:
        lines = written(trace, tmp_path)["traceEvents"]
    names = [each["args"]["name"] for each in lines if each["name"] == "process_name"]
    assert names[0] == "rank 0 (x=0), node0, its own CPU time"
    assert sum(line["ph"] == "X" for line in lines) == len(ROWS) + 2
    assert not arrows(lines) and not any("wait_us" in line.get("args", {}) for line in lines)


def test_messages_are_joined_by_their_numbers(real, tmp_path):
    """Each receive has one arrow, from the send of its number on the rank that it names."""
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


# Pipit


def read(path):
    """{process: [(ns, what, name)]} in the order of the file."""
    found = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            seconds = line["Timestamp (s)"]
            assert re.fullmatch(r"\d+\.\d{9}", seconds)
            moment = int(seconds.replace(".", ""))
            found[int(line["Process"])].append((moment, line["Event Type"], line["Name"]))
    return found


def test_pipit_rows_nest_and_no_two_of_a_process_have_one_time(trace, tmp_path):
    path = pipit.write(exported(trace), tmp_path)
    header, *lines = path.read_text().splitlines()
    assert header == "Timestamp (s),Event Type,Name,Process"
    times = [float(line.split(",")[0]) for line in lines]
    assert times == sorted(times) and len(times) == 2 * len(trace.events)
    for rank, rows in read(path).items():
        inside, seconds = [], 0
        for moment, what, name in rows:
            if what == "Enter":
                inside.append((name, moment))
            else:
                entered, begin = inside.pop()
                assert entered == name
                seconds += moment - begin
        assert not inside
        assert len({moment for moment, *_ in rows}) == len(rows)
        recorded = trace.events["dur"][trace.events["rank"] == rank].sum()
        assert abs(seconds - recorded) <= len(rows)


def test_pipit_rows_of_one_time_keep_their_order(tmp_path):
    """An outer event, one without duration where it begins, and one that ends where it ends."""
    rows = [
        row(0, 0, 4, name=0),
        row(0, 0, 0, name=1),
        row(0, 2, 4, name=2, parent=0),
        row(0, 4, 5, name=3),
    ]
    with by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 5)}, hosts=["a,b", "c", "d"]) as trace:
        events = exported(trace)
    names = {0: "outer", 1: "none", 2: "inner", 3: 'la"st, '}
    events.names["name"].update(names)
    found = read(pipit.write(events, tmp_path))[0]
    assert [(what, name) for _, what, name in found] == [
        ("Enter", "outer"),
        ("Enter", "none"),
        ("Leave", "none"),
        ("Enter", "inner"),
        ("Leave", "inner"),
        ("Leave", "outer"),
        ("Enter", 'la"st, '),
        ("Leave", 'la"st, '),
    ]
    assert [moment for moment, *_ in found] == [
        *(0, 1, 2, 2000000, 4000000, 4000001, 4000002, 5000000)
    ]


# Holistic Trace Analysis


def profiles(trace, folder):
    path = kineto.write(exported(trace), folder)
    return [json.loads(each.read_text()) for each in sorted(path.iterdir())]


def test_kineto_files_name_their_rank_first(trace, tmp_path):
    path = kineto.write(exported(trace), tmp_path)
    for rank, each in enumerate(sorted(path.iterdir())):
        text = each.read_text()
        assert re.search(r'"rank":\s+(\d+)', text)[1] == str(rank)
        assert json.loads(text)["distributedInfo"]["world_size"] == trace.attrs["world_size"]


def test_kineto_kernels_are_launched_in_steps_and_do_not_overlap(trace, tmp_path):
    for rank, profile in enumerate(profiles(trace, tmp_path)):
        lines = profile["traceEvents"]
        assert lines[0]["name"].startswith("ProfilerStep#"), "no launch may be the first line"
        for line in lines:
            assert {"ph", "cat", "name", "ts", "dur", "pid", "tid", "args"} == line.keys()
            assert isinstance(line["ts"], int) and isinstance(line["dur"], int)
            assert line["dur"] >= 0
        kernels = [line for line in lines if line["cat"] == "kernel"]
        launches = [line for line in lines if line["cat"] == "cuda_runtime"]
        numbers = [[line["args"]["correlation"] for line in each] for each in (kernels, launches)]
        assert numbers[0] == numbers[1] == [*range(1, len(kernels) + 1)]
        assert len(kernels) == (trace.events["rank"] == rank).sum()
        assert all(line["tid"] == line["args"]["stream"] > 0 for line in kernels)
        compute = [line for line in kernels if line["tid"] == kineto.COMPUTE]
        for line, following in pairwise(compute):
            assert line["ts"] + line["dur"] <= following["ts"]


def test_kineto_times_are_rounded_down(tmp_path):
    rows = [row(0, 0, 1.0006), row(0, 1.0006, 1.0008), row(0, 1.0008, 3)]
    with by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 3)}) as trace:
        lines = profiles(trace, tmp_path)[0]["traceEvents"]
    found = [(line["ts"], line["dur"]) for line in lines if line["cat"] == "kernel"]
    assert found == [(0, 1000), (1000, 0), (1000, 2000)]


def test_kineto_calls_last_from_where_they_were_posted(tmp_path):
    rows = [*ROWS[:3], *ROWS[3:], call(0, "all_reduce", 9.2, 9.5, seq=1, posted=1.5, count=7)]
    with small(tmp_path / "trace.h5", rows) as trace:
        lines = profiles(trace, tmp_path)[0]["traceEvents"]
    found = next(
        line for line in lines if "all_reduce" in line["name"] and line["cat"] == "kernel"
    )
    assert (found["ts"], found["dur"]) == (1500, 8000)
    assert re.match("^nccl.*Kernel", found["name"])
    args = found["args"]
    assert (args["Collective name"], args["Group size"], args["Rank"]) == ("all_reduce", 2, 0)
    assert (args["In msg nelems"], args["dtype"]) == (7, "float32")
    assert args["Process Group Ranks"] == str([*GROUPS[0][1]])


# The choice of steps, and the command


def test_only_the_steps_that_were_asked_for(real, tmp_path):
    steps = real.events["step"]
    for first, last in ((1, 1), (1, None), (0, 1)):
        events = exported(real, first=first, last=last)
        upper = steps.max() if last is None else last
        assert len(events.columns["rank"]) == ((steps >= first) & (steps <= upper)).sum()
        assert {step for _, step, *_ in events.steps} == set(range(first, upper + 1))
        assert events.columns["start"].min() == 0 <= events.links.min()
        assert np.all(events.columns["step"][events.links[:, 0]] >= first)
    with pytest.raises(ValueError, match="no events of steps 7 to None"):
        exported(real, first=7)


def test_the_report_exports_what_it_is_told_to(real, tmp_path, capsys):
    path, out = str(real.path), tmp_path / "out"
    words = ["--tables", "--out", str(out), "--steps", "1:1", "--export"]
    assert report.main([path, *words, "perfetto,hta"]) == 0
    assert {each.name for each in (out / "exports").iterdir()} == {"perfetto.json", "hta"}
    assert report.main([path, path, *words, "pipit"]) == 0
    assert (out / "exports" / "2" / "pipit.csv").exists()
    for wrong, why in (("otf2", "otf2: not one of perfetto, pipit, hta"),):
        with pytest.raises(SystemExit):
            report.main([path, *words, wrong])
        assert why in capsys.readouterr().err


def test_one_step_may_be_named_alone(real, tmp_path):
    texts = {}
    for steps in ("1", "1:1", "1:", ":1"):
        out = tmp_path / steps.replace(":", "-")
        words = ["--tables", "--out", str(out), "--steps", steps, "--export", "pipit"]
        assert report.main([str(real.path), *words]) == 0
        texts[steps] = (out / "exports" / "pipit.csv").read_bytes()
    assert texts["1"] == texts["1:1"]
    assert len(set(texts.values())) == 3


def test_paths_of_what_was_exported_are_returned(hand, tmp_path):
    paths = export(["pipit", "hta"], exported(hand), tmp_path / "new")
    assert [path.name for path in paths] == ["pipit.csv", "hta"]
    assert all(path.exists() for path in paths)
