"""Training on several hosts gives the losses of one process, on every layout and transport."""

import re

import numpy as np
import pytest

from tests.hosts.emulated import Emulated
from tests.runs import losses, newest, train, words

pytestmark = pytest.mark.hosts

STEPS = 3
LAYOUTS = {
    "cube": {},
    "cube by MPI": {"mesh__transport": "mpi"},
    "1-D": {"parallel__scheme": "1d"},
    "SUMMA, data": {"parallel__scheme": "2d-summa", "mesh__x": 2, "mesh__y": 2, "mesh__d": 2},
    "ZeRO 3": {"mesh__d": 8, "parallel__zero": 3, "mesh__transport": "mpi"},
    "pipeline": {"mesh__p": 2, "mesh__x": 2, "mesh__z": 2, "parallel__microbatches": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def hosts(folder):
    with Emulated(2, clocks=[(2, 5000)], shared=[folder]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(folder):
    """Losses of one process."""
    return losses(train(1, folder / "alone", train__steps=STEPS + 1))


def run(hosts, ranks, out, *more, **values):
    """Return the folder of a run that must succeed."""
    command = ["python", "-m", "hpc3d.train", *words(out, **values), *more]
    done = hosts.mpirun(ranks, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [hosts.left(1), hosts.left(2)] == [0, 0]
    return newest(out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_on_two_hosts_match_a_single_process(layout, hosts, folder, alone):
    values = LAYOUTS[layout] | {"train__steps": STEPS}
    place = run(hosts, (4, 4), folder / layout, **values)
    assert "\n8 ranks on 2 hosts: hn1 4, hn2 4\n" in (place / "train.log").read_text()
    np.testing.assert_allclose(losses(place), alone[:STEPS], rtol=1e-10)


def test_run_resumes_with_fewer_ranks_on_two_hosts(hosts, folder, alone):
    out = folder / "continued"
    run(hosts, (2, 2), out, train__steps=2, checkpoint__every=1)
    command = ["python", "-m", "hpc3d.train", "--resume", newest(out), "--train.steps", STEPS + 1]
    done = hosts.mpirun((1, 1), *command)
    assert done.returncode == 0, done.stdout + done.stderr
    said = (newest(out) / "train.log").read_text()
    assert re.findall(r"^\d+ ranks on .*", said, re.MULTILINE) == [
        "4 ranks on 2 hosts: hn1 2, hn2 2",
        "2 ranks on 2 hosts: hn1 1, hn2 1",
    ]
    np.testing.assert_allclose(losses(newest(out)), alone[2:], rtol=1e-10)
