"""Loss of a host or of its link ends the job with a message and an exit code."""

import re
import subprocess

import pytest

from hpc3d.console.exit_codes import STALLED
from tests.hosts.emulated import Emulated
from tests.mpi import ROOT
from tests.runs import losses, newest, said, wait_for, words

pytestmark = pytest.mark.hosts

KEEPALIVE = {"time": 6, "intvl": 3, "probes": 3}


@pytest.fixture
def keepalive(monkeypatch):
    """Options that make setup writes for mpirun."""
    for name, value in KEEPALIVE.items():
        monkeypatch.setenv(f"PRTE_MCA_oob_tcp_keepalive_{name}", str(value))


@pytest.fixture
def hosts(tmp_path):
    with Emulated(hosts=2, shared=[tmp_path]) as hosts:
        yield hosts


def lost(hosts, out, what, **values):
    """Return the result of a run whose host 2 is lost in the second step or later."""

    def meanwhile():
        wait_for(lambda: any("   1 " in log.read_text() for log in out.glob("*/train.log")))
        what(2)

    how = {"train__steps": 100_000, "checkpoint__every": 1, "mesh__x": 4} | values
    line = words(out, mesh__y=1, mesh__z=1, **how)
    command = "python", "-m", "hpc3d.train", *line
    return hosts.mpirun((2, 2), *command, timeout=90, meanwhile=meanwhile)


def assert_failed(done, tmp_path):
    """Assert that jobs/ treats the exit of the launcher as a failure."""
    output = tmp_path / "said"
    output.write_text(done.stdout)
    words = ["bash", "-c", "source jobs/kept.sh; kept $0 $1", str(done.returncode), output]
    assert subprocess.run(words, cwd=ROOT, check=False, capture_output=True).returncode


def assert_empty(hosts, *numbers):
    for number in numbers:
        wait_for(lambda number=number: not hosts.left(number))


def test_lost_link_is_reported_by_the_host_of_rank_0(hosts, tmp_path):
    done = lost(hosts, tmp_path / "out", hosts.cut, run__watchdog_s=5)
    (line,) = said(done)
    assert line.startswith("hpc3d.train: no progress for 5 s: ")
    assert re.search(r"all of hn1|ranks? [-0-9 ]+ \(hn1\)", line)
    assert re.search(r"all of hn1 and hn2|all of hn2|ranks? [-0-9 ]+ \(hn2\)", line)
    summary = newest(tmp_path / "out") / "watchdog" / "summary.txt"
    assert line == f"hpc3d.train: {summary.read_text().strip()}"
    assert f"Errorcode: {STALLED}" in done.stderr
    assert_failed(done, tmp_path)
    assert_empty(hosts, 1, 2)


def test_mpirun_detects_a_lost_link(hosts, tmp_path, keepalive):
    done = lost(hosts, tmp_path / "out", hosts.cut, run__watchdog_s=300)
    assert "lost communication with a remote daemon" in done.stderr
    assert not said(done)
    assert_failed(done, tmp_path)
    assert_empty(hosts, 1, 2)


def test_run_resumes_on_the_remaining_host_after_a_power_loss(hosts, tmp_path):
    out = tmp_path / "out"
    done = lost(hosts, out, hosts.kill, run__watchdog_s=60)
    assert_failed(done, tmp_path)
    assert_empty(hosts, 1)
    run = newest(out)
    steps = 2 + max(int(path.name[5:]) for path in run.glob("checkpoints/step-????????"))
    again = hosts.mpirun(
        (4,), "python", "-m", "hpc3d.train", "--resume", run, "--train.steps", steps
    )
    assert again.returncode == 0, again.stderr
    assert len(losses(run)) == steps
