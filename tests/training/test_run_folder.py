"""The folder of a resumed run: reopened after any interruption, and used by one run only."""

import os
import shutil
import subprocess
from dataclasses import replace

import pytest

import hpc3d.trace
from hpc3d.checkpoints.resume import run_to_resume
from hpc3d.config.input_file import Config
from hpc3d.training import run_folder
from tests.checkpoints.killed_runs import at_write, child, ended, kill
from tests.trace.test_previous_attempts import attempt, steps_of


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run with a trace and a stop request, killed while it saved step 3."""
    run = tmp_path_factory.mktemp("runs") / "run"
    run.mkdir()
    attempt(run, 0, 3)
    (run / "config.toml").write_text("first = 1\n")
    (run / "checkpoints" / "step-00000003.tmp").mkdir(parents=True)
    (run / "checkpoints" / "step-00000003.tmp" / "rank-00000.bin").touch()
    (run / "checkpoints" / "latest.123.tmp").touch()
    (run / "STOP").touch()
    return run


def reopen(run):
    run_folder.reopen(run, "second = 2\n")


@pytest.mark.slow
def test_reopen_can_be_killed_at_any_write(run, tmp_path):
    points, copy = tmp_path / "points", tmp_path / "copy"

    def interrupted(point):
        paths = at_write(point, kill, within=str(copy))
        reopen(copy)
        points.write_text(str(len(paths)))

    shutil.copytree(run, copy)
    assert ended(child(interrupted, 0)) == 0
    for point in range(1, 1 + int(points.read_text())):
        shutil.rmtree(copy)
        shutil.copytree(run, copy)
        assert ended(child(interrupted, point)) == -9
        assert run_to_resume(["--resume", str(copy)]) == copy, point
        reopen(copy)
        assert (copy / "config.toml").read_text() == "second = 2\n"
        assert "first = 1\n" in [path.read_text() for path in copy.glob("config-*.toml")]
        assert not [*(copy / "checkpoints").iterdir()] and not (copy / "STOP").exists()
        (aside,) = copy.glob("trace-*.h5")
        with hpc3d.trace.open(aside) as trace:
            assert steps_of(trace) == [0, 1, 2], point
        assert not (copy / "trace.h5").exists() and not [*(copy / "trace").iterdir()]
    assert point > 10


def test_what_a_killed_run_left_is_removed(tmp_path):
    kept = ["trace.h5", "trace/rank-00000-0000.npz", "checkpoints/latest", "mine.tmp"]
    save = "checkpoints/step-00000003.tmp/rank-00000.bin.host.7.tmp"
    left = [save, *(f"{name}.host.7.tmp" for name in kept), "config.toml.8.tmp"]
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    run_folder.clear(tmp_path)
    found = (path for path in tmp_path.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == sorted(kept)
    assert [*(tmp_path / "checkpoints").iterdir()] == [tmp_path / "checkpoints" / "latest"]


def test_unwritable_folder_is_rejected(run, tmp_path, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "copy")

    def full(*_):
        raise OSError(28, os.strerror(28), str(copy))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"--resume .*copy: .*: No space left .* resume"):
        reopen(copy)


def test_reason_for_a_failed_folder_creation_is_reported(tmp_path, monkeypatch):
    def taken(*_):
        raise FileExistsError("100 runs named gpt already exist")

    monkeypatch.setattr(run_folder, "fresh", taken)
    with pytest.raises(ValueError, match=r" \(100 .*gpt .*\); .*--run\.out"):
        run_folder.create(replace(Config(), run=replace(Config().run, out=str(tmp_path))), "")


def test_unwritable_lock_is_named(tmp_path):
    (tmp_path / "lock").symlink_to("/dev/full")
    with pytest.raises(OSError) as full:
        run_folder.claim(tmp_path)
    assert full.value.filename == str(tmp_path / "lock")


def test_folder_in_place_of_the_lock_is_named(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(ValueError, match=rf"^{tmp_path}/lock: Is a directory; "):
        run_folder.claim(tmp_path)


def test_only_one_run_may_use_a_folder(tmp_path):
    held = run_folder.claim(tmp_path)
    with pytest.raises(ValueError, match=rf"process {os.getpid()} on "):
        run_folder.claim(tmp_path, patience=0.2)
    held.close()
    run_folder.claim(tmp_path, patience=0).close()


def test_killed_process_releases_its_lock(tmp_path):
    def claim_and_die():
        held = run_folder.claim(tmp_path)
        assert held
        kill()

    assert ended(child(claim_and_die)) == -9
    run_folder.claim(tmp_path, patience=0).close()


def test_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(run_folder.fcntl, "flock", unknown)
    run_folder.claim(tmp_path, patience=0).close()


def test_git_revision_is_that_of_the_source_folder(tmp_path, monkeypatch):
    def git(*words):
        name = "-c", "user.name=a", "-c", "user.email=a@b"
        command = ["git", "-C", tmp_path, *name, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    source = tmp_path / "lib" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(run_folder.hpc3d, "__file__", str(source))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    assert run_folder.git_revision() == ""
    git("add", ".")
    git("commit", "-q", "-m", "ours")
    assert run_folder.git_revision() == git("rev-parse", "HEAD")
    source.write_text("changed = True")
    assert run_folder.git_revision() == git("rev-parse", "HEAD") + "+"
