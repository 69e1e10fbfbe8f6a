"""An unusable checkpoint is named and kept, and the previous one is used."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hpc3d.checkpoints.sharded import steps_of
from tests.checkpoints.killed_runs import LAYOUTS, losses, run_until

LAST = "step-00000002"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Run that has saved steps 1 and 2."""
    folder = tmp_path_factory.mktemp("sound")
    run_until(folder, "x=2", 2)
    return folder


@pytest.fixture
def base(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "base")


@pytest.fixture(scope="module", params=["layers=2", "heads=6", "tied=false", "optimizer=sgd"])
def another(request, tmp_path_factory):
    """Run of another model or optimizer."""
    folder = tmp_path_factory.mktemp("another")
    with pytest.MonkeyPatch.context() as patch:
        words = LAYOUTS["serial"].replace("layers=1 ", "") + " layers=1 " + request.param
        patch.setitem(LAYOUTS, "another", words)
        run_until(folder, "another", 2)
    return folder


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def said(folder):
    """Return the log lines of a run that resumes without making a step."""
    (folder / "said").unlink()
    run_until(folder, "x=2", 0)
    return (folder / "said").read_text().splitlines()


def truncate(folder):
    path = folder / "rank-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / "rank-00001.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(data)


def rewrite(folder, **values):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (truncate, "rank-00001.bin has"),
        (flip, "rank-00001.bin "),
        (lambda folder: (folder / "rank-00000.bin").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "JSON"),
        (lambda folder: rewrite(folder, step=7), "step 7"),
        (lambda folder: rewrite(folder, config="[model"), " configuration "),
        (shutil.rmtree, None),
    ],
)
def test_damaged_checkpoint_is_named_and_kept_and_the_previous_is_used(base, damage, line):
    damage(base / "checkpoints" / LAST)
    before = content(base / "checkpoints")
    lines = said(base)
    assert content(base / "checkpoints") == before
    assert re.fullmatch(f"resume: step 1 .*{base}/checkpoints/step-00000001", lines[-1])
    assert len(lines) == 1 + bool(line)
    if line:
        assert line in lines[0] and f"{base}/checkpoints/{LAST}" in lines[0]


def test_checkpoint_of_another_model_is_named_and_kept(base, another):
    shutil.rmtree(base / "checkpoints" / LAST)
    shutil.copytree(another / "checkpoints" / LAST, base / "checkpoints" / LAST)
    before = content(base / "checkpoints")
    first, last = said(base)
    assert first.startswith(f"resume: {base}/checkpoints/{LAST} has ")
    assert re.search(r"model\.\w+ = |first and second moments", first)
    assert last.startswith("resume: step 1 ")
    assert content(base / "checkpoints") == before


@pytest.mark.parametrize(
    "change", [Path.unlink, lambda path: path.write_text("step-00000099\n"), lambda path: None]
)
def test_newest_checkpoint_is_found_without_the_latest_file(base, change):
    change(base / "checkpoints" / "latest")
    assert re.fullmatch(f"resume: step 2 .*{base}/checkpoints/{LAST}", *said(base))


def test_run_without_intact_checkpoints_is_rejected_with_all_reasons(base):
    for folder in steps_of(base / "checkpoints"):
        flip(folder)
    before = content(base / "checkpoints")
    with pytest.raises(ValueError, match=f"{base}: .*start a new run") as caught:
        run_until(base, "x=2", 0)
    *damaged, _ = str(caught.value).splitlines()
    assert len(damaged) == 2 and all(".bin " in line for line in damaged)
    assert content(base / "checkpoints") == before


def test_run_that_skips_damaged_checkpoints_keeps_its_own(sound, base):
    """The last two of steps 1 to 4 are damaged; after step 3 is saved again, step 2 remains."""
    run_until(base, "x=2", 4)
    shutil.copytree(sound / "checkpoints", base / "checkpoints", dirs_exist_ok=True)
    for number in (3, 4):
        flip(base / "checkpoints" / f"step-0000000{number}")
    run_until(base, "x=2", 3)
    names = [path.name[-1] for path in steps_of(base / "checkpoints")]
    assert names == ["4", "3", "2"]
    assert said(base)[-1].startswith("resume: step 3 ")
    assert all(len(values) == 1 for values in losses(base).values())
