"""Placement of ranks with the launcher settings written by `make setup`."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpc3d.runtime import mpi_library
from tests.hosts.emulated import Emulated
from tests.mpi import ROOT

pytestmark = pytest.mark.hosts

EXPORTED = re.compile(r"^export (\w+_MCA_\w+) *\?= (\S+)$", re.MULTILINE)
WRITTEN = re.compile(r"printf '%s\\n' ((?:[^>]|\n)+)> \.venv/etc/prte-mca-params\.conf")
NAME = "from mpi4py import MPI; import os; print(os.uname().nodename)"
PARAMETERS = Path(sys.prefix, "etc/prte-mca-params.conf")


@pytest.fixture
def hosts(tmp_path):
    with Emulated(2, shared=[tmp_path]) as hosts:
        yield hosts


def hosts_of(done):
    assert done.returncode == 0, done.stderr
    return Counter(done.stdout.split())


def test_exported_mpi_settings_place_ranks_on_hosts_with_slots(hosts):
    exported = dict(EXPORTED.findall((ROOT / "Makefile").read_text()))
    assert mpi_library.CROWD_5 in exported
    done = hosts.mpirun((4, 4), "python", "-c", NAME, env=exported)
    assert hosts_of(done) == {"hn1": 4, "hn2": 4}


def test_mpi_parameter_file_places_ranks_on_hosts_with_slots(hosts, tmp_path):
    if not PARAMETERS.exists():
        pytest.skip("mpirun is not the wheel's")
    (written,) = WRITTEN.findall((ROOT / "Makefile").read_text())
    lines = re.findall(r'"(.+?)"', written)
    (tmp_path / "parameters").write_text("\n".join([*lines, ""]))
    hosts.on(0, "mount", "--bind", tmp_path / "parameters", PARAMETERS)
    unset = {mpi_library.CROWD_5: None}
    done = hosts.mpirun((4, 4), "python", "-c", NAME, env=unset)
    assert hosts_of(done) == {"hn1": 4, "hn2": 4}
