"""What the doctor checks of a process and its machine, each with something that is wrong."""

import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc3d.diagnose import node_checks, storage_checks
from hpc3d.runtime import environment
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding, examine
from tests.diagnose.planted import only, started_by_nobody, verdicts
from tests.mpi import ROOT


@pytest.fixture
def no_launcher(monkeypatch):
    started_by_nobody(monkeypatch)


def test_a_finding_is_a_line_and_its_remedy():
    lines = Finding(FAIL, "MPI", "is broken", "repair it\nor not").lines()
    assert lines == ["FAIL  MPI: is broken", "      -> repair it", "      -> or not"]
    assert Finding(OK, "MPI", "works").lines() == ["ok    MPI: works"]


def test_a_check_that_raises_is_a_finding():
    def some_thing():
        yield Finding(OK, "a", "b")
        raise KeyError("c")

    assert verdicts(examine(some_thing)) == [(OK, "a"), (WARN, "some thing")]


# -------------------------------------------------------------------------------- packages


def test_python_of_now_and_an_older_one(monkeypatch):
    assert only(node_checks.python()).verdict == OK
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    assert "3.11" in only(node_checks.python()).remedy


def test_packages_of_now():
    names = [name for name, _ in node_checks.requirements()]
    assert names == ["numpy", "mpi4py", "h5py", "pydantic", "ml_dtypes"]
    found = only(node_checks.packages())
    assert found.verdict == OK and all(name in found.text for name in [*names, "HDF5"])


@pytest.mark.parametrize("version", ["1.26.4", "0", None])
def test_a_package_that_is_too_old_or_not_there(version, monkeypatch):
    real = node_checks.installed
    monkeypatch.setattr(
        node_checks, "installed", lambda name: version if name == "numpy" else real(name)
    )
    found = only(node_checks.packages())
    assert found[:2] == (FAIL, "numpy")
    assert found.remedy.endswith('pip install "numpy>=2.0"')


def test_a_package_that_cannot_be_loaded(monkeypatch, tmp_path):
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
def test_more_threads_than_cores(no_launcher, asked, monkeypatch):
    assert verdicts(node_checks.threads(1))[0] == (OK, "threads")
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    first = next(node_checks.threads(1))
    assert first[:2] == (WARN, "threads") and "unset OMP_NUM_THREADS" in first.remedy


def test_ranks_share_the_cores(no_launcher, monkeypatch):
    monkeypatch.setattr(environment, "cores_of_node", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert next(node_checks.threads(4)).verdict == OK
    assert next(node_checks.threads(8)).verdict == WARN


@pytest.mark.parametrize(
    ("text", "wrong"), [("150000 100000", True), ("200000 100000", False), ("max 100000", False)]
)
def test_a_container_that_gives_less_time_than_it_shows_cores(text, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(node_checks, "QUOTA", tmp_path / "cpu.max")
    node_checks.QUOTA.write_text(f"{text}\n")
    assert len(list(node_checks.quota(2))) == wrong


@pytest.fixture
def node(monkeypatch):
    """The module of shared memory, without MPI, in which things can be planted."""
    fake = SimpleNamespace(SHARED="/dev/shm", usable=lambda ranks: True)
    monkeypatch.setitem(sys.modules, "hpc3d.comm.shared_memory", fake)
    return fake


def test_shared_memory(node, tmp_path, monkeypatch):
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
def test_a_limit_that_is_too_low(limit, subject, remedy, monkeypatch):
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, (-1, -1)))
    monkeypatch.setattr(node_checks, "FABRICS", ["/proc"])
    assert verdicts(node_checks.limits(64)) == [(OK, "open files")]
    limits[limit] = (100, 4096)
    (wrong,) = [finding for finding in node_checks.limits(64) if finding.verdict != OK]
    assert wrong[:2] == (WARN, subject) and wrong.remedy.startswith(remedy)


# ------------------------------------------------------------------------------------ disk


def test_a_disk_on_which_all_is_well(tmp_path):
    folder = tmp_path / "not" / "yet"
    assert [verdict for verdict, _ in verdicts(storage_checks.storage(folder))] == [OK, OK]
    assert not list(tmp_path.iterdir())


def fail_with(code):
    def function(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return function


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("mkdir", errno.EROFS),
        ("fsync", errno.EIO),
        ("replace", errno.EPERM),
        ("open", errno.EDQUOT),
    ],
)
def test_a_disk_on_which_something_is_refused(function, code, tmp_path, monkeypatch):
    with monkeypatch.context() as planted:
        planted.setattr(os, function, fail_with(code))
        found = only(storage_checks.storage(tmp_path))
    assert found[:2] == (FAIL, "disk") and os.strerror(code) in found.text
    assert "--run.out" in found.remedy


def test_a_file_and_its_folder_are_synced(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(handle):
        synced.append(stat.S_IFMT(os.fstat(handle).st_mode))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    storage_checks.replaced(tmp_path)
    assert synced == [stat.S_IFREG, stat.S_IFDIR]


@pytest.mark.parametrize("folder", ["/proc", __file__])
def test_a_folder_that_cannot_be_written(folder):
    assert only(storage_checks.storage(Path(folder, "results"))).verdict == FAIL


def test_a_full_disk(tmp_path):
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from hpc3d.diagnose.storage_checks import storage
print(*[line for finding in storage({str(tmp_path)!r}) for line in finding.lines()], sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert (
        done.stdout.startswith(f"FAIL  disk: {tmp_path}: ") and "(File too large)" in done.stdout
    )
    assert not list(tmp_path.iterdir())


def test_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(
        storage_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8)
    )
    assert next(storage_checks.storage(tmp_path))[:2] == (WARN, "disk")


@pytest.mark.parametrize(
    ("kind", "verdict"), [("nfs4", WARN), ("tmpfs", WARN), ("fuse.sshfs", WARN), ("lustre", OK)]
)
def test_where_a_folder_lies(kind, verdict, tmp_path, monkeypatch):
    inner = tmp_path / "a b"
    inner.mkdir()
    mounts = tmp_path / "mounts"
    point = str(inner).replace(" ", r"\040")
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\nx {tmp_path} xfs rw 0 0\nx {point} {kind} rw 0 0\n"
    )
    monkeypatch.setattr(storage_checks, "MOUNTS", mounts)
    found = only(storage_checks.lies_on(inner / "results"))
    assert found.verdict == verdict and kind in found.text
    assert (
        storage_checks.file_system(tmp_path) == "xfs" and storage_checks.file_system("/") == "ext4"
    )
