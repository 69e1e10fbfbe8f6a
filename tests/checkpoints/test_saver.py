"""Runs that are killed, or whose disk becomes full, during any write: no announced checkpoint is
lost, and the resumed run is bitwise equal."""

import errno
import os
import re
import resource
import shutil
from itertools import takewhile
from pathlib import Path
from tempfile import gettempdir

import pytest

from hpc3d.checkpoints.inspect import best_of
from hpc3d.checkpoints.sharded import Checkpoint, named, steps_of
from tests.checkpoints.killed_runs import at_write, child, ended, kill, losses, run_until

BEFORE, END = 2, 4
MESSAGE = re.compile(r"rank-\d{5}\.json")


@pytest.fixture(scope="module", params=["serial", pytest.param("x=2", marks=pytest.mark.slow)])
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def whole(layout, tmp_path_factory):
    """Losses of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run_until(folder, layout, END)
    return losses(folder)


@pytest.fixture
def base(layout, tmp_path):
    """Run that has saved steps 1 and 2."""
    (tmp_path / "base").mkdir()
    run_until(tmp_path / "base", layout, BEFORE)
    return tmp_path / "base"


def attempts(base, layout, act, **how):
    """Continue by one step, with `act(path)` at one write after the other; yield (number of the
    write, exit code, folder). `how` contains arguments of `run_until`."""
    folder, points = base.with_name("attempt"), base.with_name("points")

    def attempt(point):
        paths = at_write(point, act)
        run_until(folder, layout, BEFORE + 1, **how)
        points.write_text(str(len(paths)))

    shutil.copytree(base, folder)
    assert ended(child(attempt, 0)) == 0
    for point in range(1, 1 + int(points.read_text())):
        shutil.rmtree(folder)
        shutil.copytree(base, folder)
        yield point, ended(child(attempt, point)), folder


def whole_ones(folder):
    """Return the steps of the intact checkpoints of a run."""
    found = []
    for path in steps_of(folder / "checkpoints"):
        try:
            opened = Checkpoint(path)
        except ValueError:
            continue
        found += [] if opened.damage() else [opened.header["step"]]
    return found


def latest(folder):
    return int((folder / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))


@pytest.mark.slow
def test_run_killed_at_any_write_resumes_without_losing_a_checkpoint(base, layout, whole):
    saved = []
    for point, code, folder in attempts(base, layout, kill):
        assert code == -9
        newest = whole_ones(folder)[0]
        assert newest >= latest(folder) >= BEFORE, point
        run_until(folder, layout, END)
        assert losses(folder) == whole, point
        assert not [*(folder / "checkpoints").glob("*.tmp")], point
        saved.append(newest)
    # before the folder has its name, and after
    assert len(saved) > 20
    assert saved == sorted(saved) and {*saved} == {BEFORE, BEFORE + 1}


@pytest.mark.slow
def test_full_disk_at_any_write_keeps_the_announced_checkpoints(base, layout, capfd):
    def full(path):
        names = [path] if path else []  # the system names no file that cannot be synced
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *names)

    codes = []
    for point, code, folder in attempts(base, layout, full):
        said, kept = capfd.readouterr().err, whole_ones(folder)
        if code:  # a temporary name that stays does no harm
            assert "No space left" in said and str(folder) in said, point
            assert len(said.splitlines()) == 1
        assert kept in ([2, 1], [3, 2, 1], [3, 2]) if code else kept == [3, 2], point
        assert latest(folder) in kept
        codes.append(code)
    assert codes.count(1) > 20


@pytest.mark.parametrize("room", [1000, 20000])
def test_file_size_limit_keeps_the_previous_checkpoints(base, layout, room, capfd):
    def attempt():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        run_until(base, layout, BEFORE + 1)

    (base / "losses").unlink()
    (base / "losses").symlink_to("/dev/null")
    assert ended(child(attempt)) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "File too large" in line and f"{base}/checkpoints/step-00000003.tmp/rank-0000" in line
    assert whole_ones(base) == [2, 1]


@pytest.mark.skipif(os.getuid() != 0, reason="wants a user who may become another one")
def test_read_only_folder_keeps_the_previous_checkpoints(base, layout, capfd):
    temporary = Path(gettempdir())

    def attempt():
        os.setgid(65534)
        os.setuid(65534)
        run_until(base, layout, BEFORE + 1)

    for path in base.iterdir():
        if path.is_file():
            path.chmod(0o666)
    for folder in takewhile(lambda folder: folder != temporary, [base, *base.parents]):
        folder.chmod(0o755)
    assert ended(child(attempt)) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "Permission denied" in line and "step-00000003.tmp" in line
    assert whole_ones(base) == [2, 1]


def test_files_are_synced_before_they_are_renamed(base, layout, monkeypatch):
    """Every file, also in a folder, is synced before it is renamed, and then the folder with the
    new name is synced first. Messages to rank 0, which are removed later, are exempt."""
    done, fsync, replace = [], os.fsync, os.replace

    def sync(descriptor):
        fsync(descriptor)
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def rename(source, target):
        if MESSAGE.fullmatch(Path(target).name):
            return replace(source, target)
        assert str(source) in done or {*map(str, source.iterdir())} <= {*done, *renamed}
        replace(source, target)
        done.append(f"renamed {target}")
        renamed.append(str(target))

    renamed = []
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    run_until(base, layout, BEFORE + 1)
    names = ["rank-00000.bin", "manifest.json", "step-00000003", "latest"]
    found = [path.rpartition("/")[2] for path in renamed]
    assert [name for name in found if "00001" not in name] == names
    if layout == "serial":
        for path in renamed:
            after = done[done.index(f"renamed {path}") + 1]
            assert after == path.rpartition("/")[0], path


EVALUATIONS = {1: 5.0, 2: 3.0, 3: 4.0, 5: 3.5, 6: 2.0, 7: 2.5}


@pytest.mark.parametrize(("every", "kept"), [
    (1, {1: [1], 2: [2, 1], 3: [3, 2], 4: [4, 3, 2], 5: [5, 4, 2], 6: [6, 5], 8: [8, 7, 6]}),
    (3, {1: [1], 2: [2, 1], 3: [3, 2], 5: [3, 2], 6: [6, 3], 8: [6, 3]}),
    (0, {1: [1], 5: [2, 1], 6: [6, 2], 8: [6, 2]}),
])  # fmt: skip
def test_best_checkpoint_is_kept_in_addition_to_the_newest(every, kept, tmp_path, layout):
    """It is also saved in steps without a regular checkpoint, and is removed when another one is
    better."""
    for until, expected in kept.items():
        (folder := tmp_path / str(until)).mkdir()
        run_until(folder, layout, until, every, EVALUATIONS)
        assert whole_ones(folder) == expected, until
        best = min((loss, step) for step, loss in EVALUATIONS.items() if step <= until)[1]
        assert best in expected and best_of(steps_of(folder / "checkpoints")) == named(best)


def test_resumed_run_saves_its_last_step_without_an_interval(base, layout):
    run_until(base, layout, END - 1, every=0, steps=END)
    assert whole_ones(base) == [2, 1]
    run_until(base, layout, END, every=0, steps=END)
    assert whole_ones(base) == [END, 2]


@pytest.mark.slow
def test_best_checkpoint_survives_a_kill_at_any_write(layout, tmp_path):
    """The best checkpoint according to the newest intact one is intact, at every write of a save
    that replaces the best checkpoint."""
    evaluations, saved = {1: 5.0, 3: 4.0}, []
    (tmp_path / "base").mkdir()
    run_until(tmp_path / "base", layout, BEFORE, 1, evaluations)
    how = {"every": 1, "evaluations": evaluations}
    for point, code, folder in attempts(tmp_path / "base", layout, kill, **how):
        whole = whole_ones(folder)
        assert code == -9 and whole[0] >= BEFORE, point
        best = best_of(steps_of(folder / "checkpoints"))
        assert best == named(3 if whole[0] == 3 else 1), point
        assert int(best.removeprefix("step-")) in whole, point
        saved.append(best)
    assert {*saved} == {named(1), named(3)}
