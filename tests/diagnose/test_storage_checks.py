"""The doctor's checks of folders and disks, each with a planted fault."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc3d.diagnose import storage_checks
from hpc3d.runtime.finding import FAIL, OK, WARN
from tests.diagnose.planted import only, verdicts
from tests.mpi import ROOT


def test_writable_disk_passes(tmp_path):
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
def test_failed_disk_operation_is_reported(function, code, tmp_path, monkeypatch):
    with monkeypatch.context() as planted:
        planted.setattr(os, function, fail_with(code))
        found = only(storage_checks.storage(tmp_path))
    assert found[:2] == (FAIL, "disk") and os.strerror(code) in found.text
    assert "--run.out" in found.remedy


def test_file_and_folder_are_synced(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(handle):
        synced.append(stat.S_IFMT(os.fstat(handle).st_mode))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    storage_checks.replaced(tmp_path)
    assert synced == [stat.S_IFREG, stat.S_IFDIR]


@pytest.mark.parametrize("folder", ["/proc", __file__])
def test_unwritable_folder_fails(folder):
    assert only(storage_checks.storage(Path(folder, "results"))).verdict == FAIL


def test_full_disk_fails(tmp_path):
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


def test_low_disk_space_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(
        storage_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8)
    )
    assert next(storage_checks.storage(tmp_path))[:2] == (WARN, "disk")


@pytest.mark.parametrize(
    ("kind", "verdict"), [("nfs4", WARN), ("tmpfs", WARN), ("fuse.sshfs", WARN), ("lustre", OK)]
)
def test_file_system_type_of_a_folder(kind, verdict, tmp_path, monkeypatch):
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
