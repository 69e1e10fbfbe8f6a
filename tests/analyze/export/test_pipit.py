"""Export of events to Pipit."""

import csv
import re
from collections import defaultdict

from hpc3d.analyze.export import pipit
from tests.analyze.export.exported import exported
from tests.analyze.synthetic import by_hand, row


def read(path):
    """Return a dict from process to its list of (ns, kind, name), in file order."""
    found = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            seconds = line["Timestamp (s)"]
            assert re.fullmatch(r"\d+\.\d{9}", seconds)
            moment = int(seconds.replace(".", ""))
            found[int(line["Process"])].append((moment, line["Event Type"], line["Name"]))
    return found


def test_pipit_rows_nest_and_timestamps_of_a_process_are_distinct(trace, tmp_path):
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


def test_pipit_maps_each_device_stream_to_a_thread(tmp_path):
    """Concurrent computation and copies are not nested."""
    rows = [row(0, 0, 4, stream=1), row(0, 1, 3, stream=1, parent=0), row(0, 2, 5, stream=4)]
    with by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 5)}, hosts=["a", "b"]) as trace:
        path = pipit.write(exported(trace), tmp_path)
    with path.open(newline="") as file:
        found = [
            (float(line["Timestamp (s)"]) * 1e3, line["Event Type"], line["Thread"])
            for line in csv.DictReader(file)
        ]
    assert [(round(time), *rest) for time, *rest in found] == [
        (0, "Enter", "1"),
        (1, "Enter", "1"),
        (2, "Enter", "4"),
        (3, "Leave", "1"),
        (4, "Leave", "1"),
        (5, "Leave", "4"),
    ]


def test_pipit_rows_with_equal_times_keep_their_order(tmp_path):
    """Tests an outer event, an event of zero length at its start, and one with the same end."""
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
