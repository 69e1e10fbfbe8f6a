"""Export to OTF2 archives, read back by OTF2 readers."""

from collections import Counter, defaultdict

import pytest

from hpc3d.analyze.export import otf2_archive
from tests.analyze.export.exported import exported
from tests.analyze.small import ROWS, small
from tests.analyze.synthetic import call, row

otf2 = pytest.importorskip("otf2", reason="extra otf2")
MS = 1_000_000


def read(path):
    """Return the events of an archive by (process, stream), and its definitions."""
    found = defaultdict(list)
    with otf2.reader.open(str(path / "trace.otf2")) as reader:
        for location, event in reader.events:
            found[location.group.name, location.name].append(event)
        return found, reader.definitions


def kinds(events):
    return [type(event).__name__ for event in events]


@pytest.mark.slow
def test_otf2_archive_has_every_event_with_its_bytes_and_flops(trace, tmp_path):
    events = exported(trace)
    found, definitions = read(otf2_archive.write(events, tmp_path))
    assert definitions.clock_properties.timer_resolution == 10**9
    assert len({process for process, _ in found}) == trace.attrs["world_size"]
    entered = Counter()
    for (process, _), lines in found.items():
        inside, seconds, last = [], 0, 0
        for line in lines:
            assert line.time >= last
            last = line.time
            if isinstance(line, otf2.events.Enter):
                inside.append(line)
                entered[process] += 1
            elif isinstance(line, otf2.events.Leave):
                begun = inside.pop()
                assert begun.region is line.region
                seconds += line.time - begun.time
        assert not inside
        rank = int(process.split()[1])
        own = trace.events["rank"] == rank
        assert entered[process] == own.sum() and seconds == trace.events["dur"][own].sum()
        *_, moved = (line.values for line in lines if isinstance(line, otf2.events.Metric))
        assert moved == [trace.events[key][own].sum() for key in ("bytes", "flops")]


@pytest.mark.slow
def test_otf2_sends_match_receives_and_collectives_match_across_ranks(real, tmp_path):
    found, _ = read(otf2_archive.write(exported(real), tmp_path))
    sent, received, calls = Counter(), Counter(), defaultdict(Counter)
    for (process, _), lines in found.items():
        rank = int(process.split()[1])
        for line in lines:
            name = type(line).__name__
            if name in ("MpiSend", "MpiIsend"):
                peer = _rank(line.communicator.group.members[line.receiver])
                sent[rank, peer, line.communicator, line.msg_tag, line.msg_length] += 1
            elif name in ("MpiRecv", "MpiIrecv"):
                peer = _rank(line.communicator.group.members[line.sender])
                received[peer, rank, line.communicator, line.msg_tag, line.msg_length] += 1
            elif name in ("MpiCollectiveEnd", "NonBlockingCollectiveComplete"):
                calls[line.communicator][rank, str(line.collective_op)] += 1
    assert sent == received and set(sent.values()) == {1}
    assert calls
    for communicator, counts in calls.items():
        members = {_rank(member) for member in communicator.group.members}
        assert {rank for rank, _ in counts} == members
        for op in {op for _, op in counts}:
            assert len({counts[rank, op] for rank in members}) == 1


def _rank(location):
    return int(location.group.name.split()[1])


def test_otf2_event_sequence_of_a_hand_written_step(hand, tmp_path):
    found, _ = read(otf2_archive.write(exported(hand), tmp_path))
    first = next(lines for (process, _), lines in found.items() if process.startswith("rank 0"))
    assert kinds(first) == [
        *("Enter", "Metric", "Leave"),
        *("Enter", "MpiCollectiveBegin", "MpiCollectiveEnd", "Metric", "Leave"),
        *("Enter", "MpiRecv", "Metric", "Leave"),
    ]
    end, message = first[5], first[9]
    assert (end.time, end.size_sent, end.size_received) == (6 * MS, 1000, 1000)
    assert end.collective_op == otf2.CollectiveOp.ALLGATHER
    assert end.root == otf2.CollectiveRoot.NONE.value
    assert (message.time, message.sender, message.msg_length) == (9 * MS, 1, 400)
    assert first[6].values == [1000, 4e9]
    where = {attribute.name: value for attribute, value in first[0].attributes.items()}
    assert where == {"step": 0, "layer": 0, "stage": 0, "chunk": 0, "phase": "forward"}


def test_otf2_requests_have_the_time_at_which_calls_were_posted(tmp_path):
    early = {"posted": 1.5, "count": 7}
    rows = [*ROWS, call(0, "all_reduce", 9.2, 9.5, seq=1, **early)]
    with small(tmp_path / "trace.h5", rows) as trace:
        found, _ = read(otf2_archive.write(exported(trace), tmp_path))
    first = next(lines for (process, _), lines in found.items() if process.startswith("rank 0"))
    request, *_ = (line for line in first if "Request" in type(line).__name__)
    end, *_ = (line for line in first if "Complete" in type(line).__name__)
    assert (request.time, end.time) == (1.5 * MS, 9.5 * MS)
    assert request.request_id == end.request_id and end.size_sent == 28


def test_otf2_streams_are_locations_that_may_overlap_in_time(tmp_path):
    rows = [row(0, 0, 4, stream=1), row(0, 1, 3, "comm", op="all_gather", stream=2), *ROWS[3:]]
    with small(tmp_path / "trace.h5", rows) as trace:
        found, definitions = read(otf2_archive.write(exported(trace), tmp_path))
    streams = {name: kinds(lines) for (_, name), lines in found.items()}
    assert streams["rank 0, computation"] == ["Enter", "Leave"] == streams["rank 0, communication"]
    types = {location.name: location.type for location in definitions.locations}
    assert types["rank 0, computation"] == otf2.LocationType.ACCELERATOR_STREAM
    assert types["rank 1, host"] == otf2.LocationType.CPU_THREAD


def test_otf2_omits_communication_if_ranks_share_no_clock(hand, tmp_path):
    events = exported(hand)
    object.__setattr__(events, "one_time", False)
    found, _ = read(otf2_archive.write(events, tmp_path))
    assert {name for lines in found.values() for name in kinds(lines)} == {
        "Enter",
        "Leave",
        "Metric",
    }
