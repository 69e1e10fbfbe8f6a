"""The doctor names hosts with different environments or sources, in one line."""

import json
import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.hosts.emulated import Emulated
from tests.mpi import ROOT

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture
def hosts(folder):
    with Emulated(3, shared=[folder]) as hosts:
        yield hosts


def versions(hosts, folder):
    """Return the exit code and the result of the doctor on three hosts."""
    words = ["python", "-m", "hpc3d.doctor", "--together", "--json", "--out", folder]
    done = hosts.mpirun((1, 2, 1), *words)
    (result,) = [line for line in done.stdout.splitlines() if line.startswith('{"verdict"')]
    assert len(re.findall(r"versions: ", done.stdout)) == 1, done.stdout
    (row,) = [row for row in json.loads(result)["findings"] if row["subject"] == "versions"]
    return done.returncode, row


def instead(hosts, number, path, other):
    """Replace a file or folder on one host."""
    hosts.on(number, "mount", "--bind", other, path)


def test_identical_hosts_pass_the_version_check(hosts, folder):
    code, row = versions(hosts, folder)
    assert code == 0 and row["verdict"] == "ok"
    assert all(name in row["text"] for name in ("h5py", "pydantic", "mpi4py", "numpy", "sources"))


def test_different_packages_and_sources_are_reported_by_host(hosts, folder):
    (metadata,) = Path(sysconfig.get_path("purelib")).glob("h5py-*.dist-info/METADATA")
    own = re.search(r"^Version: (.*)", metadata.read_text(), re.MULTILINE)[1]
    other = folder / "METADATA"
    other.write_text(metadata.read_text().replace(f"Version: {own}", "Version: 3.1.4"))
    instead(hosts, 2, metadata, other)
    source, copy = ROOT / "hpc3d" / "train.py", folder / "train.py"
    shutil.copy(source, copy)
    with copy.open("a") as file:
        file.write("# of another day\n")
    instead(hosts, 3, source, copy)
    code, row = versions(hosts, folder)
    assert code == 3 and row["verdict"] == "FAIL"
    sources, package = row["text"].split("; ")
    assert package == f"h5py {own} on hn1 hn3, 3.1.4 on hn2"
    assert re.fullmatch(r"sources \w{12} on hn1 hn2, \w{12} on hn3", sources)
