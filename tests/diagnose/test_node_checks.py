"""The doctor's checks of a process and its machine, each with a planted fault."""

import resource
import sys
from types import SimpleNamespace

import pytest

from hpc3d.diagnose import node_checks
from hpc3d.runtime import environment, host_map
from hpc3d.runtime.finding import FAIL, OK, WARN
from tests.diagnose.planted import only, started_by_nobody, verdicts


@pytest.fixture
def no_launcher(monkeypatch):
    started_by_nobody(monkeypatch)


# -------------------------------------------------------------------------------- packages


def test_python_version_check(monkeypatch):
    assert only(node_checks.python()).verdict == OK
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    assert "3.11" in only(node_checks.python()).remedy


def test_installed_packages_pass():
    names = [name for name, _ in node_checks.requirements()]
    assert names[:5] == ["numpy", "mpi4py", "h5py", "pydantic", "ml_dtypes"]
    found = only(node_checks.packages())
    assert found.verdict == OK and all(name in found.text for name in [*names, "HDF5"])


@pytest.mark.parametrize("version", ["1.26.4", "0", None])
def test_outdated_or_missing_package_fails(version, monkeypatch):
    real = node_checks.installed
    monkeypatch.setattr(
        node_checks, "installed", lambda name: version if name == "numpy" else real(name)
    )
    found = only(node_checks.packages())
    assert found[:2] == (FAIL, "numpy")
    assert found.remedy.endswith('pip install "numpy>=2.0"')


def test_package_that_cannot_be_imported_fails(monkeypatch, tmp_path):
    (tmp_path / "h5py.py").write_text("raise ImportError('libhdf5.so.310 is not there')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = only(node_checks.packages())
    assert found.verdict == FAIL and "libhdf5.so.310 is not there" in found.text


def test_versions_are_compared_as_numbers():
    ascending = ["1.26.4", "2", "2.0.1rc1", "2.4", "2.10", "10"]
    assert sorted(ascending[::-1], key=node_checks.release) == ascending
    assert (
        node_checks.release("2.0.0")
        == node_checks.release("2")
        == node_checks.release("2.0.0+local.1")
    )


# ------------------------------------------------------------------------ cores and memory


@pytest.mark.parametrize("asked", ["100000", "all"])
def test_too_many_threads_are_reported(no_launcher, asked, monkeypatch):
    assert verdicts(node_checks.threads(1))[0] == (OK, "threads")
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    first = next(node_checks.threads(1))
    assert first[:2] == (WARN, "threads") and "unset OMP_NUM_THREADS" in first.remedy


def test_thread_check_counts_all_ranks_on_the_node(no_launcher, monkeypatch):
    monkeypatch.setattr(environment, "cores_of_node", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert next(node_checks.threads(4)).verdict == OK
    assert next(node_checks.threads(8)).verdict == WARN


@pytest.mark.parametrize(
    ("text", "wrong"), [("150000 100000", True), ("200000 100000", False), ("max 100000", False)]
)
def test_cpu_quota_below_the_core_count_is_reported(text, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(node_checks, "QUOTA", tmp_path / "cpu.max")
    node_checks.QUOTA.write_text(f"{text}\n")
    assert len(list(node_checks.quota(2))) == wrong


@pytest.fixture
def node(monkeypatch):
    """Fake shared memory module without MPI, in which tests can plant faults."""
    fake = SimpleNamespace(SHARED="/dev/shm", usable=lambda ranks: True)
    monkeypatch.setitem(sys.modules, "hpc3d.comm.shared_memory", fake)
    return fake


def test_shared_memory_check(node, tmp_path, monkeypatch):
    assert only(node_checks.shared_memory(2)).verdict == OK
    node.usable = lambda ranks: False
    monkeypatch.setattr(node_checks.platform, "machine", lambda: "x86_64")
    assert "--shm-size" in only(node_checks.shared_memory(2)).remedy
    monkeypatch.setattr(node_checks.platform, "machine", lambda: "aarch64")
    assert only(node_checks.shared_memory(2)).verdict == OK
    node.SHARED = str(tmp_path / "none")
    assert only(node_checks.shared_memory(2)).verdict == WARN
    node.SHARED = "/proc"  # a folder in which no file can be made
    assert "--mesh.transport mpi" in only(node_checks.shared_memory(2)).remedy


@pytest.mark.parametrize(
    ("limit", "subject", "remedy"),
    [
        (resource.RLIMIT_NOFILE, "open files", "ulimit -n 448"),
        (resource.RLIMIT_FSIZE, "file size", "ulimit -f unlimited"),
        (resource.RLIMIT_MEMLOCK, "locked memory", "ulimit -l unlimited"),
    ],
)
def test_low_resource_limit_is_reported(limit, subject, remedy, monkeypatch, tmp_path):
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, (-1, -1)))
    monkeypatch.setattr(host_map, "_DEVICES", tmp_path)
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert verdicts(node_checks.limits(64)) == [(OK, "open files")]
    limits[limit] = (100, 4096)
    (wrong,) = [finding for finding in node_checks.limits(64) if finding.verdict != OK]
    assert wrong[:2] == (WARN, subject) and wrong.remedy.startswith(remedy)
