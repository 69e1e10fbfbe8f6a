"""A folder that the hosts do not share is rejected before anything is written to it."""

import pytest

from hpc3d.console.exit_codes import BAD_INPUT, CHECK_FAILED
from hpc3d.runtime.shared_folder import REMEDY
from tests.hosts.emulated import Emulated
from tests.runs import said, words

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def hosts(shared):
    with Emulated(hosts=2, shared=[shared]) as hosts:
        yield hosts


def train(hosts, out, *more):
    line = words(out, train__steps=2, mesh__x=4, mesh__y=1, mesh__z=1)
    return hosts.mpirun((2, 2), "python", "-m", "hpc3d.train", *line, *more)


def test_folder_that_hosts_do_not_share_is_rejected(hosts):
    before = hosts.on(1, "ls", "-A", "/tmp")
    done = train(hosts, "/tmp/own/results")
    assert done.returncode == BAD_INPUT
    assert said(done) == [
        "hpc3d.train: /tmp/own/results: hn2 does not see the files of hn1 in /tmp; " + REMEDY
    ]
    assert hosts.on(1, "ls", "-A", "/tmp") == before


def test_run_visible_on_one_host_only_cannot_be_resumed(hosts, shared):
    out = shared / "out"
    assert train(hosts, out, "--checkpoint.every", "1").returncode == 0
    (run,) = out.iterdir()
    hosts.on(1, "cp", "-r", str(run), "/tmp/own")
    files = hosts.on(1, "find", "/tmp/own")
    resume = "--resume", "/tmp/own", "--train.steps", "4"
    done = hosts.mpirun((2, 2), "python", "-m", "hpc3d.train", *resume)
    assert done.returncode == BAD_INPUT
    assert said(done) == [
        f"hpc3d.train: /tmp/own: hn2 does not see the files of hn1 there; {REMEDY}"
    ]
    assert hosts.on(1, "find", "/tmp/own") == files


def test_doctor_names_the_host_with_another_folder(hosts):
    done = hosts.mpirun((2, 2), "python", "-m", "hpc3d.doctor", "--together", "--out", "/tmp")
    assert done.returncode == CHECK_FAILED
    assert "FAIL  folder: /tmp is a different folder for all of hn2\n" in done.stdout
