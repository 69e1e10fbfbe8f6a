"""When ranks count as silent, and the reports that follow."""

import re
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.comm import threads
from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import WORLD, Mesh
from hpc3d.console.exit_codes import STALLED
from hpc3d.runtime.host_map import Homes, spans
from hpc3d.training import watchdog
from hpc3d.training.watchdog import GRACE, LATER, TOLD, RankPosition, Watchdog
from tests.elided import elided
from tests.runs import wait_for


class Ended(Exception):
    """Raised instead of ending the process."""


class Job:
    """Rank of three that only records its messages."""

    name, size, launcher = "test", 3, None

    def __init__(self, rank):
        self.rank, self.signals, self.said, self.ending = rank, [], [], threading.Lock()

    def complain(self, text):
        self.said.append(text)

    def first_to_fail(self):
        return True

    def abort(self, code):
        raise Ended(f"all with {code}")


def end(code):
    raise Ended(f"one with {code}")


@pytest.fixture
def homes():
    """Hosts of the ranks, a single one by default."""
    return Homes(["hn1"] * 3, [0, 0, 0])


@pytest.fixture
def watched(monkeypatch, tmp_path, homes):
    """Return a function that advances the time by one second, in which some ranks make progress,
    with the watchdogs of three ranks and a timeout of 20 s."""
    clock = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "ANSWER", 120)  # of a file system on a busy machine
    monkeypatch.setattr(watchdog, "save_in_child", lambda job: None)
    monkeypatch.setattr(watchdog, "leave", lambda job: end(143))
    dogs = [Watchdog(Job(rank), mesh_of(rank), tmp_path, 20, homes) for rank in range(3)]

    def second(*moving, gap=1):
        clock[0] += gap
        for dog in dogs:
            if dog.job.rank in moving:
                dog.position.comms["x"].all_reduce(np.ones(1)).wait()
            dog.look()
            dog.act()

    second()
    return second, dogs


def mesh_of(rank):
    pool = Pool()
    return Mesh({"x": 3}, {"x": rank}, {"x": Self(pool)}, Self(pool))


def files(path):
    return sorted(file.name for file in path.rglob("*.txt"))


def test_moving_ranks_are_not_silent(watched, tmp_path):
    second, dogs = watched
    for _ in range(100):
        second(0, 1, 2)
    assert [dog.silence for dog in dogs] == [0, 0, 0]
    assert not files(tmp_path)


@pytest.mark.parametrize("what", ["step", "memory", "signal"])
def test_step_memory_change_or_signal_counts_as_progress(what, watched):
    second, (dog, *_) = watched
    second(1, 2)
    assert dog.silence == 1
    if what == "step":
        dog.position.step = 7
    elif what == "memory":
        dog.pool.count("activation", 8)
    else:
        dog.job.signals.append(signal.SIGUSR1)
    second(1, 2)
    assert dog.silence == 0


def test_suspended_job_is_not_silent(watched, tmp_path):
    second, dogs = watched
    second(gap=3600)
    assert [dog.silence for dog in dogs] == [2, 2, 2]
    assert not files(tmp_path)


def test_silent_ranks_write_a_report_after_the_timeout(watched, tmp_path):
    second, _ = watched
    for moving, seconds in (((1, 2), 5), ((2,), 6), ((), 9)):
        for _ in range(seconds):
            second(*moving)
    assert not files(tmp_path)
    second()
    assert files(tmp_path) == ["rank-00000.txt", "rank-00001.txt"]
    second(0, 1, 2)
    assert not files(tmp_path)
    assert not (tmp_path / "watchdog").exists()


def test_one_rank_reports_all_positions_and_the_job_ends(watched, tmp_path):
    second, dogs = watched
    for dog in dogs:
        dog.position.step = 4
    second(0, 1, 2)
    dogs[0].position.comms["x"].waiting = "all_gather", 812, 98304, None
    for _ in range(20 + GRACE):
        second(2)
    for dog, who in zip(dogs, ("all", "one")):
        with pytest.raises(Ended, match=f"{who} with {STALLED}"):
            dog.end()
    facts = (
        "... 20 s: rank 2 silent: ...; rank 1 outside ... step 4: ...; rank 0 in all_gather "
        f"along x (call 812, 98,304 bytes) of step 4; ... {tmp_path}/watchdog"
    )
    assert re.fullmatch(elided(facts), *dogs[0].job.said)
    assert not dogs[1].job.said
    report = (tmp_path / "watchdog" / "rank-00000.txt").read_text()
    assert re.match(
        elided("in all_gather along x (call 812, 98,304 bytes) ... 4\nfor 21.0 s"), report
    )
    assert "x: ranks 0: 1 call, 1 done\n" in report
    assert "in second" in report


@pytest.mark.parametrize("homes", [Homes(["hn1", "hn2", "hn2"], [0, 1, 1])])
def test_rank_0_host_reports_for_all_hosts(watched, tmp_path, homes):
    """Other hosts' messages may be lost, so they end the job only if rank 0's host does not."""
    second, dogs = watched
    second(0, 1, 2)
    dogs[0].position.comms["x"].waiting = "all_gather", 3, 8, None
    for _ in range(20 + GRACE):
        second()
    with pytest.raises(Ended, match=f"all with {STALLED}"):
        second()
    (line,) = dogs[0].job.said
    assert "; rank 0 (hn1) in all_gather along x (call 3, 8 bytes)" in line
    assert "20 s: all of hn2 outside " in line
    for rank in (1, 2):
        dogs[rank].act()
        assert not dogs[rank].job.said


@pytest.mark.parametrize("homes", [Homes(["hn1", "hn2", "hn2"], [0, 1, 1])])
def test_another_host_ends_the_job_if_that_of_rank_0_does_not(watched, monkeypatch, homes):
    second, dogs = watched
    second(0, 1, 2)
    monkeypatch.setattr(dogs[0], "act", lambda: None)
    for _ in range(20 + GRACE + LATER):
        second()
    assert not dogs[1].job.said
    with pytest.raises(Ended):
        second()
    assert " 20 s: rank 0 (hn1) silent" in dogs[1].job.said[0]


def test_unresponsive_folder_does_not_prevent_the_end_of_the_job(watched, monkeypatch, tmp_path):
    _, (dog, *_) = watched
    over = threading.Event()
    monkeypatch.setattr(watchdog, "ANSWER", 0.2)
    for name in ("said", "write", "noted"):
        monkeypatch.setattr(dog.reports, name, lambda *_: over.wait(60))
    dog.reports.speak(dog.position, 21)
    with pytest.raises(Ended, match=f"all with {STALLED}"):
        dog.end()
    over.set()
    said = f"no progress for 20 s: {tmp_path}/watchdog does not respond either"
    assert dog.job.said == [said]


def test_ending_job_is_not_ended_again(watched):
    _, (dog, *_) = watched
    with dog.job.ending:
        dog.end()
    assert not dog.job.said


@pytest.mark.parametrize(
    ("told", "waits", "before", "after"),
    [
        pytest.param(signal.SIGTERM, True, 0, TOLD, id="leaves"),
        pytest.param(signal.SIGTERM, True, 8, 16, id="later where waits are long"),
        pytest.param(signal.SIGTERM, False, 0, None, id="not while it writes"),
        pytest.param(signal.SIGUSR1, True, 0, None, id="not for another signal"),
    ],
)
def test_signaled_rank_exits_if_its_peers_do_not_respond(told, waits, before, after, watched):
    second, (dog, *_) = watched
    for _ in range(before):
        second(1, 2)
    dog.job.signals.append(told)
    second(0, 1, 2)
    dog.position.comms["x"].waiting = ("recv", 3, 8, 0) if waits else None
    for _ in range(after or 20):
        second(1, 2)
    if after:
        with pytest.raises(Ended, match="one with 143"):
            second(1, 2)
        (line,) = dog.job.said
        assert re.match(elided(f"rank 0 ... {after + 1} s, in recv "), line)
    else:
        assert not dog.job.said


def test_communicator_shows_the_call_it_waits_in():
    """Rank 1 reads which call rank 0 waits in, and then sends the message."""
    seen, comms, both = [], {}, threading.Barrier(2)

    def work(mesh):
        comm = comms[mesh.rank] = mesh.comm("x")
        both.wait()
        if mesh.rank == 0:
            pending = comm.recv((2, 3), np.float32, 1)
            assert comm.waiting is None
            pending.wait()
        else:
            wait_for(lambda: comms[0].waiting)
            seen.append((comms[0].waiting, comms[0].calls, comms[0].done))
            comm.send(np.ones((2, 3), np.float32), 0).wait()
        comm.all_reduce(np.ones(2)).wait()
        return comm.calls, comm.done, comm.waiting

    assert threads.run({"x": 2}, work) == [(2, 2, None)] * 2
    assert seen == [(("recv", 1, 24, 1), 1, 0)]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "3"), ((0, 1, 2, 4, 5, 7), "0-2 4-5 7"), ((0, 16, 32), "0 16 32"), ((), "")],
)
def test_rank_spans_as_text(ranks, text):
    assert spans(ranks) == text


@pytest.mark.parametrize(("axis", "where"), [("x", "along x"), (WORLD, "over all ranks")])
def test_call_over_all_ranks_is_reported_without_an_axis(axis, where):
    comm = SimpleNamespace(waiting=("all_reduce", 3, 8, None))
    assert str(RankPosition({axis: comm})) == f"in all_reduce {where} (call 3, 8 bytes) of step -1"
