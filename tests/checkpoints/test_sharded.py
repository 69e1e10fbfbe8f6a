"""A run that resumes on any layout gives the results of an uninterrupted run."""

import json
import os
import re
import shutil
from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d.checkpoints import sharded
from hpc3d.checkpoints.block_slices import coverage_error, whole_of
from hpc3d.checkpoints.inspect import shapes_of
from hpc3d.checkpoints.sharded import Checkpoint, Snapshot, restore
from hpc3d.comm.threads import run
from tests.elided import elided
from tests.pipeline.mixes import (
    Trained,
    alone,
    config_of,
    cover,
    same,
    serial,
    train,
    trained_of,
    trainer_of,
)
from tests.strided import daily, strided

LAYOUTS = """
p=1 schedule=none microbatches=2
x=2 y=2 z=2 microbatches=2
x=4 scheme=1d microbatches=2
x=4 scheme=1d-sequence microbatches=2
x=2 y=2 z=2 scheme=2.5d microbatches=2
x=2 y=2 scheme=2d-summa microbatches=2
x=2 y=2 z=2 scheme=3d-broadcast microbatches=2
p=2 schedule=1f1b microbatches=4
p=2 d=2 x=2 schedule=zb-v chunks=2 microbatches=2 zero=1
d=3 y=3 zero=3 microbatches=2
d=3 y=3 zero=2 microbatches=2
p=4 d=2 schedule=zb-h1 microbatches=4 zero=1 layers_per_stage=[2,0,1,1]
d=4 zero=0 microbatches=2
d=4 shard=2 zero=3 microbatches=2
""".strip().splitlines()
STEPS = 2


def saved(line, folder):
    """Train the first steps of a layout, and save a checkpoint."""
    config = config_of(line)
    ranks = prod(config.sizes().values())

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        for number in range(STEPS):
            trainer.step(number)
        snapshot = Snapshot(trainer.parameters, trainer.optimizer)
        sharded.write_shard(folder, mesh.rank, snapshot)
        if mesh.rank == 0:
            header = {"format": sharded.FORMAT, "version": 1, "step": STEPS}
            header["updates"] = trainer.optimizer.steps
            sharded.complete(folder, ranks, header, keep=2)

    run(config.sizes(), rank)
    return Checkpoint(folder.with_suffix(""))


def resumed(line, opened):
    """Train the remaining steps of a run from a checkpoint."""
    config = config_of(line)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)
        trainer.optimizer.steps = opened.header["updates"]
        steps = [trainer.step(number) for number in range(STEPS, config.train.steps)]
        return trained_of(trainer, steps)

    return run(config.sizes(), rank)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    found = {}

    def opened(line):
        if line not in found:
            folder = tmp_path_factory.mktemp("run") / "step-00000002.tmp"
            folder.mkdir()
            found[line] = saved(line, folder)
        return found[line]

    return opened


def _when(i, j):
    if not ((i + j) % 26 or i > j or i % 2):
        return []
    return [daily, pytest.mark.slow]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, marks=_when(i, j))
        for (i, a), (j, b) in product(enumerate(LAYOUTS), repeat=2)
    ],
)
def test_resume_on_any_layout_matches_an_uninterrupted_run(checkpoints, before, after):
    expected = serial(alone(before))
    rest = Trained(expected.totals[STEPS:], expected.weights)
    found = resumed(after, checkpoints(before))
    for trained in found:
        same(trained, rest)
    cover(found, rest)


KEYS = "kind=qwen2 kv_heads=2 ffn=48"
WHOLE, CUT = (
    f"y=4 d=2 zero=1 schedule=none microbatches=2 {KEYS}",
    f"p=2 y=2 z=2 schedule=1f1b microbatches=3 {KEYS}",
)


@pytest.mark.parametrize(
    ("before", "after"),
    [(WHOLE, CUT), pytest.param(CUT, WHOLE, marks=pytest.mark.slow)],
)
def test_resume_between_replicated_and_split_key_heads(checkpoints, before, after):
    test_resume_on_any_layout_matches_an_uninterrupted_run(checkpoints, before, after)


CONTEXTS = """
c=2 d=2 zero=1 microbatches=2 sequence=8
p=2 d=2 x=2 schedule=1f1b microbatches=2 sequence=8
c=4 x=4 zero=3 microbatches=2 context=both ulysses=2 sequence=8
c=2 y=2 zero=2 microbatches=2 context=all-to-all sequence=8
""".strip().splitlines()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] if number else [])
        for number, pair in enumerate(zip(CONTEXTS, CONTEXTS[1:] + CONTEXTS[:1], strict=True))
    ],
)
def test_resume_with_another_context_split(checkpoints, before, after):
    test_resume_on_any_layout_matches_an_uninterrupted_run(checkpoints, before, after)


MODEL = "experts=4 top_k=2 capacity=1 shared_experts=1 balance_bias=0.01 steps=3"
MIXTURES = [
    f"{line} {MODEL}"
    for line in """
schedule=none microbatches=2
e=4 zero=1 microbatches=2
d=2 e=2 x=2 zero=2 microbatches=2
p=2 e=2 x=2 z=2 schedule=1f1b microbatches=3
d=4 e=4 zero=3 microbatches=3
e=2 x=2 y=2 z=2 microbatches=3
d=2 x=2 y=2 zero=1 scheme=2d-summa microbatches=2
""".strip().splitlines()
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), strided([*zip(MIXTURES, MIXTURES[1:] + MIXTURES[:1], strict=True)], 8, 3)
)
def test_resume_of_experts_on_another_layout(checkpoints, before, after):
    test_resume_on_any_layout_matches_an_uninterrupted_run(checkpoints, before, after)


@pytest.mark.parametrize("line", strided(MIXTURES[1:], 3))
def test_experts_moved_to_another_layout_and_back_are_bitwise_equal(checkpoints, tmp_path, line):
    """From e = 1 to e = 2 or 4 and back: weights, states, and the bias of the router."""
    moves_there_and_back(
        checkpoints, tmp_path, MIXTURES[0], line, ("layers.3.router.bias", "value")
    )


@pytest.mark.slow
def test_expert_master_weights_moved_and_back_are_bitwise_equal(checkpoints, tmp_path):
    model = "experts=4 top_k=2 dtype=float16 steps=3"
    lines = f"schedule=none microbatches=2 {model}", f"d=2 e=4 zero=3 microbatches=2 {model}"
    moves_there_and_back(checkpoints, tmp_path, *lines, ("layers.3.experts.down.weight", "master"))


def moves_there_and_back(checkpoints, folder, home, away, key):
    """A checkpoint of `home`, which has `key`, is bitwise equal after being in another layout."""
    first = checkpoints(home)
    there = moved(first, away, folder / "a")
    back = moved(there, home, folder / "b")
    expected = whole_arrays(first)
    assert {("layers.0.experts.up.weight", "first"), key} < {*expected}
    for opened in (there, back):
        found = whole_arrays(opened)
        assert found.keys() == expected.keys()
        for each, array in expected.items():
            assert array.any(), each
            assert found[each].tobytes() == array.tobytes(), each


def moved(opened, line, folder):
    """Return the same checkpoint, saved by another layout."""
    config, header = config_of(line), {**opened.header}
    begun = folder / "step-00000002.tmp"
    begun.mkdir(parents=True)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)
        snapshot = Snapshot(trainer.parameters, trainer.optimizer)
        sharded.write_shard(begun, mesh.rank, snapshot)
        if mesh.rank == 0:
            sharded.complete(begun, mesh.ranks, header, keep=2)

    run(config.sizes(), rank)
    return Checkpoint(begun.with_suffix(""))


def whole_arrays(opened):
    """Return {(name, kind): array}; assert that every element occurs once."""
    shapes, found = shapes_of(config_of(MIXTURES[0]).model), {}
    for (name, kind), parts in opened.sources.items():
        whole = whole_of(shapes[name])
        if sizes := [part for _, part in parts if part.size]:
            assert coverage_error(sizes, whole) is None
            found[name, kind] = np.empty(whole.shape)
            opened.fill(found[name, kind], name, kind, whole)
    return found


@pytest.mark.parametrize(
    ("before", "after"), [(5, 10), pytest.param(1, 8, marks=pytest.mark.slow)]
)
def test_resume_of_a_bert_with_padded_vocabulary_vectors(checkpoints, before, after):
    lines = (f"{LAYOUTS[number]} kind=bert steps=3" for number in (before, after))
    test_resume_on_any_layout_matches_an_uninterrupted_run(checkpoints, *lines)


@pytest.mark.slow
@pytest.mark.parametrize("line", strided([LAYOUTS[1], LAYOUTS[8], LAYOUTS[9]], 3))
def test_resume_on_the_same_layout_is_bitwise_equal(checkpoints, line):
    config = config_of(line)
    whole = run(config.sizes(), lambda mesh: train(mesh, config))
    for one, other in zip(whole, resumed(line, checkpoints(line)), strict=True):
        assert one.totals[STEPS:] == other.totals
        for name, (_, block) in one.weights.items():
            assert (block == other.weights[name][1]).all(), name


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("rank-00001.bin", truncate, "rank-00001.bin has"),
        ("rank-00001.bin", flip, "rank-00001.bin ... changed"),
        ("rank-00002.bin", lambda path: path.unlink(), "No such file"),
        ("manifest.json", truncate, "step-00000002 ... manifest"),
        (
            "manifest.json",
            lambda path: path.write_text("{}"),
            "step-00000002 ... manifest",
        ),
        ("manifest.json", lambda path: path.unlink(), "No such file"),
    ],
)
def test_damaged_checkpoint_file_is_named(checkpoints, tmp_path, name, damage, said):
    shutil.copytree(checkpoints(LAYOUTS[2]).folder, folder := tmp_path / "step-00000002")
    damage(folder / name)
    try:
        found = Checkpoint(folder).damage()
    except ValueError as error:
        found = str(error)
    assert re.search(elided(said), found)


@pytest.mark.parametrize(("value", "dtype"), [(1e300, "float32"), (7e4, "float16")])
def test_values_beyond_the_range_of_another_type_are_refused(checkpoints, value, dtype):
    """They would become infinite; a value that is already infinite is accepted."""
    opened, whole = Checkpoint(checkpoints(LAYOUTS[0]).folder), whole_of((2,))
    opened.sources = {("norm", "value"): [(np.array([value, np.inf]).reshape(whole.shape), whole)]}
    with pytest.raises(ValueError) as refused:
        opened.fill(np.empty(whole.shape, dtype), "norm", "value", whole)
    assert str(refused.value) == (
        f"{opened.folder}: norm, value: {value:g} exceeds the range of {dtype}; set --train.dtype "
        "float64, the type of the stored values"
    )
    opened.fill(same := np.empty(whole.shape), "norm", "value", whole)
    assert same.ravel().tolist() == [value, np.inf]


def test_checkpoint_of_another_model_is_rejected(checkpoints):
    with pytest.raises(ValueError, match=r"model\.layers = |layers\.4\."):
        resumed("p=1 schedule=none microbatches=2 layers=5", checkpoints(LAYOUTS[0]))


def test_write_shard_does_not_use_the_folder_after_its_message(tmp_path, monkeypatch):
    """A rank must not access the folder after it has sent its message."""
    folder, replace = tmp_path / "step-00000002.tmp", os.replace

    def taking(source, target):
        replace(source, target)
        if target.suffix == ".json":
            replace(folder, tmp_path / "step-00000002")

    folder.mkdir()
    monkeypatch.setattr(os, "replace", taking)
    snapshot = SimpleNamespace(arrays=[np.ones(3)], nbytes=24, pieces=[])
    sharded.write_shard(folder, 1, snapshot)
    assert {path.name for path in (tmp_path / "step-00000002").iterdir()} == {
        "rank-00001.bin",
        "rank-00001.json",
    }


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3):
        folder = tmp_path / f"step-0000000{step}.tmp"
        folder.mkdir()
        saved(LAYOUTS[0], folder)
    assert [path.name for path in sharded.steps_of(tmp_path)] == [
        "step-00000003",
        "step-00000002",
    ]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    manifest = json.loads((tmp_path / "step-00000003" / "manifest.json").read_text())
    assert manifest["step"] == STEPS and len(manifest["files"]) == 1
