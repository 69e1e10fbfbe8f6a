"""A new folder with example inputs and job scripts."""

import os
import shutil
from pathlib import Path

import pytest

from hpc3d import init
from hpc3d.config.load import load

ROOT = Path(__file__).parents[1]


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_inputs_and_job_scripts_are_written(tmp_path, capsys):
    folder = tmp_path / "my experiments"
    assert init.main([str(folder)]) == 0
    found = files(folder)
    for name in ("inputs/gpt-3d-64.toml", "inputs/machines/h100.toml", "jobs/train.sbatch"):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
        assert name in found
    assert any(name.startswith("inputs/corpus/") for name in found)
    assert not any("this-machine" in name or "__pycache__" in name for name in found)
    assert load(folder / "inputs" / "gpt-3d-64.toml", []).mesh.x == 4
    printed = capsys.readouterr().out
    assert f"{len(found)} files written" in printed
    # --launch starts 8 ranks on any number of cores, unlike mpirun -np 8
    assert "    python -m hpc3d.train inputs/gpt-3d-8.toml --launch 8\n" in printed


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    mine = tmp_path / "jobs" / "train.sbatch"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert init.main([str(tmp_path)]) == 2
    assert files(tmp_path) == {"jobs/train.sbatch"} and mine.read_text() == "mine"
    assert "exists, so nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_destination_that_is_no_folder_is_rejected(place, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert init.main([str(tmp_path / place)]) == 2
    assert "cannot write there" in capsys.readouterr().err


@pytest.mark.parametrize("existing", [".", "new", "new/jobs"])
def test_failure_leaves_the_destination_as_it_was(existing, tmp_path, monkeypatch, capsys):
    def full(source, target):
        copy(source, target)
        if target.name == "train.sbatch":
            raise OSError(28, os.strerror(28), str(target))

    copy = shutil.copyfile
    (tmp_path / existing).mkdir(parents=True, exist_ok=True)
    before = [*tmp_path.rglob("*")]
    monkeypatch.setattr(shutil, "copyfile", full)
    assert init.main([str(tmp_path / "new")]) == 2
    assert [*tmp_path.rglob("*")] == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "new: cannot write there (No space left on device), so nothing was written"
    )
