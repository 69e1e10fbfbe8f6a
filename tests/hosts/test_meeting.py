"""The doctor soon reports ranks that cannot connect, in one message."""

import pytest

from hpc3d.console.exit_codes import STALLED
from tests.hosts.emulated import Emulated
from tests.runs import said

pytestmark = pytest.mark.hosts

WORDS = ("python", "-m", "hpc3d.doctor", "--together")


@pytest.fixture
def hosts():
    with Emulated(3) as hosts:
        yield hosts


def doctor(hosts, **how):
    done = hosts.mpirun((2, 1, 1), *WORDS, "--out", "/tmp", timeout=60, **how)
    said = [line for line in done.stdout.splitlines() if line.startswith("FAIL  meeting: ")]
    assert done.stdout.count("-> set OMPI_MCA_btl_tcp_if_include") == len(said)
    return done.returncode, said


def test_doctor_reports_no_problem_between_connected_hosts(hosts):
    code, said = doctor(hosts)
    assert not said and code == 3  # /tmp is another one on each host


def drop(hosts, number, other):
    """Drop all packets from one host to another."""
    hosts.on(number, "ip", "neigh", "replace", f"10.77.0.{other + 1}", "lladdr",
             "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")  # fmt: skip


def test_doctor_reports_a_firewall_between_two_hosts(hosts):
    """None of these hosts has rank 0."""
    drop(hosts, 2, 3)
    drop(hosts, 3, 2)
    code, said = doctor(hosts)
    assert said == ["FAIL  meeting: no message in 5 s between hn2 and hn3 (ranks 2-3)"]
    assert code == 3


def test_doctor_reports_a_firewall_around_one_host(hosts):
    for other in (2, 3):
        drop(hosts, 1, other)
        drop(hosts, other, 1)
    code, said = doctor(hosts)
    assert said == [
        "FAIL  meeting: no message in 5 s between hn1 and hn2 (ranks 0-2); "
        "hn1 and hn3 (ranks 0-1 3)"
    ]
    assert code == 3


def test_training_behind_a_firewall_ends_with_a_timeout(hosts):
    drop(hosts, 1, 2)
    drop(hosts, 2, 1)
    done = hosts.mpirun((2, 1, 1), "python", "-m", "hpc3d.train", "--run.out", "/tmp", timeout=90)
    assert done.returncode == STALLED
    lines = {line.partition(";")[0] for line in said(done) if line.startswith("hpc3d.")}
    told = {
        f"hpc3d.train: hn{host} did not reach all other hosts within 60 s" for host in (1, 2, 3)
    }
    assert lines and lines <= told
