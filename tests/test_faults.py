"""Runs with a failing rank end within seconds, with one line and a readable trace."""

import re
import time
import uuid

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.console.exit_codes import FAILED, STALLED
from hpc3d.trace.merge import merge
from tests.mpi import mpirun
from tests.runs import assert_gone, newest, said, when_running, words

slow = pytest.mark.slow
NEVER = 1000  # seconds until the watchdog would end a job that has to end by itself
PROMPT = 150  # seconds in which such a job ends, on a busy machine too
SILENT = 10  # seconds until the watchdog ends the job of a rank that is silent


class Fault:
    """Job with a fault, which ends it soon; contains the result and the remaining files."""

    def __init__(self, out, fault, ranks, who, prompt=PROMPT, **values):
        name, file = f"fault-{uuid.uuid4().hex}", out / "time"
        how = {"name": name, "train__steps": 1000, "checkpoint__every": 1}
        how |= {"run__watchdog_s": NEVER}
        line = words(out / "results", **(how | values))
        self.ranks, self.who = ranks, who
        program = "-m", "tests.faulty_train", fault, who, file
        self.done = mpirun(ranks, *program, *line, timeout=prompt + 100)
        assert file.exists(), f"it ended before its fault:\n{self.done}"
        assert time.time() - float(file.read_text()) < prompt
        assert_gone(name)
        self.run = newest(out / "results")

    def assert_trace(self):
        """Assert that it is readable, has all steps of the rank, and names the missing ranks."""
        with hpc3d.trace.open(merge(self.run)) as trace:
            steps, ranks = trace.steps["step"], trace.steps["rank"]
            present = set(np.unique(trace.events["rank"]).tolist())
            assert steps[ranks == self.who].tolist()[:2] == [0, 1]
            assert_all_accounted_for(self.ranks, present, trace.attrs["missing"])

    def assert_checkpoint(self):
        """Assert that all announced checkpoints exist and are complete."""
        latest = (self.run / "checkpoints" / "latest").read_text().strip()
        assert Checkpoint(self.run / "checkpoints" / latest).damage() is None
        announced = re.findall(r"checkpoint (step-\d+):", self.done.stdout)
        assert latest >= max([*announced, "step-00000001"])

    def assert_reports(self):
        """Assert that all ranks except the silent one have written their positions and stacks."""
        (line,) = said(self.done)
        silent = f"no progress for {SILENT} s: rank {self.who} silent: stopped or terminated; rank"
        assert line.startswith(f"hpc3d.train: {silent}")
        assert line.endswith(f"; stacks in {self.run}/watchdog")
        assert re.search(
            r"; ranks? [-0-9 ]+ in \w+ along [xyz] \(call \d+, \d+ bytes\) of step 2", line
        )
        reports = {path.name: path.read_text() for path in (self.run / "watchdog").iterdir()}
        assert line == "hpc3d.train: " + reports.pop("summary.txt").strip()
        others = [rank for rank in range(self.ranks) if rank != self.who]
        assert sorted(reports) == [f"rank-{rank:05d}.txt" for rank in others]
        for text in reports.values():
            assert "of step 2\nfor " in text
            assert "calls, " in text
            assert "in wait_until" in text


def case(*values, ranks=4):
    return pytest.param(*values, ranks, marks=slow)


SAID = {
    "raise": (1, r"failed\n(.*\n)*KeyError: 'a message of one rank'\n"),
    "memory": (1, r"failed: out of memory \(a message of one rank\); use more ranks, "),
    "exit": (7, r"exited with 7\n"),
    "reader": (1, r"failed\n(.*\n)*RuntimeError: a message of the reader\n"),
    "writer": (1, r"failed\n(.*\n)*RuntimeError: a message of the writer\n"),
    "full disk": (1, r"failed: No space left on device: /.*/checkpoints.*; fix that, then "),
}


@pytest.mark.parametrize(
    ("fault", "who", "transport", "ranks"),
    [
        case("raise", 2, "auto"),
        case("raise", 0, "mpi"),
        case("memory", 3, "mpi"),
        case("exit", 3, "mpi"),
        case("exit", 0, "auto", ranks=8),
        case("reader", 0, "auto"),
        case("writer", 0, "mpi"),
        case("writer", 7, "auto", ranks=8),
        case("full disk", 2, "auto"),
        case("full disk", 0, "auto", ranks=8),
    ],
)
def test_failing_rank_ends_the_job(fault, who, transport, ranks, tmp_path):
    ended = Fault(tmp_path, fault, ranks, who, mesh__transport=transport)
    code, message = SAID[fault]
    assert ended.done.returncode == code
    assert len(said(ended.done)) == 1
    assert re.search(rf"hpc3d.train: rank {who} {message}", ended.done.stderr)
    assert ended.done.stderr.count("Traceback") == (r"\n(" in message)
    ended.assert_trace()
    ended.assert_checkpoint()


@pytest.mark.parametrize(
    ("who", "transport", "ranks"),
    [
        case(0, "mpi", ranks=2),
        case(0, "mpi"),
        case(3, "auto"),
        case(11, "auto", ranks=16),
        case(7, "mpi", ranks=8),
    ],
)
def test_killed_rank_ends_the_job(who, transport, ranks, tmp_path):
    ended = Fault(tmp_path, "kill", ranks, who, mesh__transport=transport)
    assert ended.done.returncode == 128 + 9
    assert re.search(rf"rank {who} .*\s.*signal 9", ended.done.stderr)
    assert not said(ended.done)
    ended.assert_trace()
    ended.assert_checkpoint()


@pytest.mark.parametrize(
    ("who", "transport", "ranks"),
    [
        case(0, "auto", ranks=2),
        case(0, "auto"),
        case(3, "mpi"),
        case(0, "mpi", ranks=8),
        case(7, "auto", ranks=8),
    ],
)
def test_suspended_rank_ends_the_job(who, transport, ranks, tmp_path):
    how = {"mesh__transport": transport, "run__watchdog_s": SILENT}
    ended = Fault(tmp_path, "stop", ranks, who, **how)
    assert ended.done.returncode == STALLED
    ended.assert_reports()
    ended.assert_trace()
    ended.assert_checkpoint()


@slow
def test_deleted_text_is_named(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "results"
    text.write_text("a line\n" * 1000)
    options = words(out, train__steps=100000, data__path=text)
    delete = when_running(out, lambda run: text.unlink())
    done = mpirun(2, "-m", "hpc3d.train", *options, meanwhile=delete)
    (line,) = said(done)
    assert f"rank 0 failed: data.path: {text} is not a readable UTF-8 text (" in line
    assert "then start again, or continue with --resume" in line
    assert done.returncode == FAILED and "Traceback" not in done.stderr


NO_ROOM = """
import resource, sys
from hpc3d import train
from hpc3d.runtime import launch

def finish(job):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    kept(job)

kept, launch.finish = launch.finish, finish
sys.exit(train.main(sys.argv[1:]))
"""


@slow
def test_full_disk_of_all_ranks_at_the_end_is_one_line(tmp_path):
    done = mpirun(2, "-c", NO_ROOM, *words(tmp_path, train__steps=2))
    (line,) = said(done)
    assert re.fullmatch(
        r"hpc3d.train: rank \d: cleanup failed: /.*/trace/rank-0000\d-0000.npz: File too large",
        line,
    )
    assert done.returncode == FAILED and "Traceback" not in done.stderr


@slow
def test_stuck_rank_is_named_without_a_trace_as_well(tmp_path):
    ended = Fault(tmp_path, "for ever", 4, 2, trace__enabled="false", run__watchdog_s=SILENT)
    assert ended.done.returncode == STALLED
    (line,) = said(ended.done)
    assert ": rank 2 outside communication in step 2: computing, or waiting for a device" in line
    assert "in for_ever" in (ended.run / "watchdog" / "rank-00002.txt").read_text()


@slow
@pytest.mark.timeout(900)
def test_signaled_rank_that_waits_for_a_stuck_peer_exits(tmp_path):
    """After 10 s, or twice its longest earlier wait, which may be minutes on a busy machine."""
    ended = Fault(tmp_path, "desert", 4, 2, prompt=700)
    assert ended.done.returncode == 128 + 15
    (line,) = said(ended.done)
    left = r"hpc3d.train: rank 0 was asked to stop and exited: no progress for (\d+) s, "
    assert 10 <= int(re.match(left, line)[1]) < 700
    ended.assert_trace()


def assert_all_accounted_for(ranks, present, missing):
    """Every rank is in the trace, or is listed there as missing."""
    absent = {int(rank) for rank in re.findall(r"rank (\d+): no segment", missing)}
    assert present | absent == set(range(ranks))
    assert not present & absent


@slow
def test_terminated_launcher_leaves_a_trace(tmp_path):
    ended = Fault(tmp_path, "end the launcher", 2, 1)
    assert ended.done.returncode != 0
    ended.assert_trace()
    ended.assert_checkpoint()
