"""Manifests with arbitrary contents: accepted, or rejected with one line that names an entry."""

import json
import os
import re
import shutil

import pytest

from hpc3d.checkpoints.inspect import problems
from hpc3d.checkpoints.sharded import Checkpoint, restore
from tests.checkpoints.killed_runs import LAYOUTS, run, run_until
from tests.elided import elided
from tests.pipeline.mixes import config_of, trainer_of

HUGE = 10**30


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    run_until(folder, "x=2", 1)
    return folder / "checkpoints" / "step-00000001"


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / sound.name)


def rewrite(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def put(*place_and_value):
    """Return a change of the manifest, which sets the value at a place."""
    *place, key, value = place_and_value

    def change(tree):
        for step in place:
            tree = tree[step]
        tree[key] = value

    return change


def refused(folder):
    with pytest.raises(ValueError) as caught:
        Checkpoint(folder)
    (line,) = str(caught.value).splitlines()
    place, _, fault = line.partition(": ")
    assert place.startswith(f"{folder} ")
    return fault


FIRST = "files", 0
PIECE = *FIRST, "pieces", 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("format", "zip"), "hpc3d"),
        (put("version", 2), "hpc3d"),
        (put("version", "1"), "hpc3d"),
        (put("step", -1), "step must be an integer ... 9007199254740992"),
        (put("step", True), "step must be an integer ... 9007199254740992"),
        (put("updates", 1.5), "updates must be an integer ... 9007199254740992"),
        (put("texts", 3), "texts must be a JSON object"),
        (put("texts", {"data.path": {"tokens": 3}}), "the entry texts.data.path is invalid"),
        (put("best", 3), "the entry 'best' is invalid"),
        (put("best", {"step": 1}), "the entry 'best' is invalid"),
        (put("best", {"step": -1, "loss": 2.5}), "the entry 'best' is invalid"),
        (put("best", {"step": 1, "loss": "2.5"}), "the entry 'best' is invalid"),
        (put("files", None), " files"),
        (put("files", [[]]), " files"),
        (put(*FIRST, "file", "../step-00000001/rank-00000.bin"), "file name"),
        (put(*FIRST, "file", "/etc/passwd"), "file name"),
        (put(*FIRST, "file", "rank-00000.bin\n"), "file name"),
        (put(*FIRST, "file", "x" * 10000), "file name"),
        (put(*FIRST, "file", "rank-00001.bin"), "rank-00001.bin ... twice"),
        (put(*FIRST, "bytes", -5), "rank-00000.bin ... size"),
        (put(*FIRST, "bytes", HUGE), "rank-00000.bin ... size"),
        (put(*FIRST, "bytes", 7), "piece exceeds ... rank-00000.bin"),
        (put(*FIRST, "sha256", "0" * 63), "rank-00000.bin ... SHA-256"),
        (put(*FIRST, "sha256", None), "rank-00000.bin ... SHA-256"),
        (put(*FIRST, "pieces", {}), "rank-00000.bin ... pieces"),
        (put(*PIECE, []), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 0, "a\nb"), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 0, "\ud800"), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 1, "third"), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 2, "O"), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 2, ["<f4"]), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 3, -8), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 3, HUGE), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 3, 10**9), "piece exceeds ... rank-00000.bin"),
        (put(*PIECE, 4, 0, [0, 2**61, 0, 2**61]), "piece exceeds ... rank-00000.bin"),
        (put(*PIECE, 4, 0, [3, 1, 0, 1]), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 4, 0, [0, 1, -4, 1]), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 4, 0, [0.0, 1, 0, 1]), "rank-00000.bin ... invalid piece"),
        (put(*PIECE, 4, 0, "0101"), "rank-00000.bin ... invalid piece"),
    ],
)
def test_invalid_manifest_entry_is_named(copy, change, said):
    rewrite(copy, change)
    assert re.search(elided(said), refused(copy))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "JSON"),
        ("[1, 2]", "JSON object"),
        ("null", "JSON object"),
        ("[" * 100000, "JSON"),
        ('{"step": ' + "9" * 5000 + "}", "JSON"),
        ("\udcff", "JSON"),
        ("{}", "hpc3d"),
    ],
)
def test_manifest_that_is_no_json_object_is_rejected(copy, text, said):
    (copy / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    assert re.search(elided(said), refused(copy))


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_non_regular_files_are_rejected_without_blocking(copy, name, make):
    (copy / name).unlink()
    make(copy / name)
    refused(copy)


def test_oversized_manifest_is_not_read(copy):
    os.truncate(copy / "manifest.json", 2 << 30)
    assert "(2147483648 bytes)" in refused(copy)


STRANGE = (None, True, -1, 0, 7, HUGE, 1e308, "", "value", "../x", [], [[]], {}, {"file": 1})


@pytest.mark.slow
def test_any_modified_manifest_is_rejected_or_read(sound, copy, chance):
    """Tests 300 changes at random places; each error message names the checkpoint."""
    outcomes = []
    for _ in range(300):
        manifest = json.loads((sound / "manifest.json").read_text())
        tree, key = chance.choice([*places(manifest)])
        tree[key] = chance.choice(STRANGE)
        (copy / "manifest.json").write_text(json.dumps(manifest))
        found = problems(copy)
        assert all(line.startswith(str(copy)) and "\n" not in line for line in found)
        outcomes.append(bool(found))
    assert outcomes.count(True) > 200


def places(tree):
    """Return (container, key) of every entry in a JSON tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def test_overlapping_pieces_do_not_replace_missing_ones(copy):
    """The total number of elements is correct, but some occur twice and others are missing."""
    name = "layers.0.up.weight"

    def change(manifest):
        one, other = (
            next(piece for piece in file["pieces"] if piece[:2] == [name, "value"])
            for file in manifest["files"]
        )
        assert one[4] != other[4]
        other[4] = one[4]

    rewrite(copy, change)
    opened, config = Checkpoint(copy), config_of(LAYOUTS["serial"])

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)

    with pytest.raises(ValueError, match=rf" \d+ of \d+ .* {name}, value"):
        run({}, rank)
