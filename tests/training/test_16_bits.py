"""Checkpoints and results of runs with 16-bit values and float32 master weights."""

import json
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hpc3d.benchmarks import torch_reference
from hpc3d.checkpoints import sharded
from hpc3d.checkpoints.block_slices import whole_of
from hpc3d.checkpoints.hf_export import export
from hpc3d.checkpoints.hf_import import Pretrained, configured
from hpc3d.checkpoints.inspect import about, problems, shapes_of
from hpc3d.checkpoints.new_run import begin
from hpc3d.checkpoints.sharded import Checkpoint, Snapshot, restore
from hpc3d.comm.threads import run
from hpc3d.config.load import to_toml
from hpc3d.training.optimizers.catalog import OPTIMIZERS
from hpc3d.training.trainer import Trainer
from tests.pipeline.mixes import Tokens, config_of, trainer_of
from tests.strided import strided

MODEL = "layers=2 batch=24 dtype=float32"
SERIAL = "schedule=none microbatches=2"
LAYOUTS = ["d=2 x=2 zero=1 scheme=1d microbatches=2", "p=2 d=2 zero=3 microbatches=2"]
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def wrote(folder, line, dtype, act):
    """Save a checkpoint of trainers in `dtype` after `act(trainer)`."""
    config = config_of(f"{MODEL} {line}")
    text = to_toml(config)
    config = replace(config, train=replace(config.train, dtype=dtype))
    begun = folder / "checkpoints" / "step-00000002.tmp"
    begun.mkdir(parents=True)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        assert trainer.parameters.value.dtype == TYPES[dtype]
        act(trainer)
        sharded.write_shard(begun, mesh.rank, Snapshot(trainer.parameters, trainer.optimizer))
        if mesh.rank == 0:
            header = {"config": text, "position": None, "step": 2, "updates": 2}
            sharded.complete(begun, mesh.ranks, header, keep=1)

    run(config.sizes(), rank)
    return Checkpoint(begun.with_suffix(""))


def updated(trainer):
    """Make two updates with random gradients."""
    draw = np.random.default_rng(5)
    for _ in range(2):
        trainer.parameters.grad[...] = draw.normal(size=trainer.parameters.grad.shape)
        trainer.optimizer.update(1e-2, 1.0)


def stored(opened):
    """Return {(name, kind): array} of a checkpoint, complete and valid."""
    assert problems(opened.folder) == []
    shapes = shapes_of(config_of(f"{MODEL} {SERIAL}").model)
    found = {}
    for (name, kind), parts in opened.sources.items():
        whole = whole_of(shapes[name])
        found[name, kind] = np.empty(whole.shape, parts[0][0].dtype)
        opened.fill(found[name, kind], name, kind, whole)
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Checkpoint of a serial run in a type."""
    found = {}

    def opened(dtype):
        if dtype not in found:
            folder = tmp_path_factory.mktemp(dtype)
            found[dtype] = wrote(folder, SERIAL, dtype, updated)
        return found[dtype]

    return opened


CHANGES = [pair for pair in product(TYPES, repeat=2) if pair != ("float32", "float32")]


@pytest.mark.parametrize(("before", "after"), strided(CHANGES, 6))
def test_run_in_any_type_resumes_from_any_other_on_any_layout(first, tmp_path, before, after):
    opened = first(before)
    known = stored(opened)
    for line in LAYOUTS:

        def resumed(trainer):
            restore(opened, trainer.parameters, trainer.optimizer)

        found = stored(wrote(tmp_path / line, line, after, resumed))
        kinds = {"value", "first", "second"} | ({"master"} if after != "float32" else set())
        assert {kind for _, kind in found} == kinds
        for (name, kind), array in found.items():
            full = "value" if before == "float32" else "master"
            source = known[name, full if kind in ("value", "master") else kind]
            expected = source.astype(TYPES[after] if kind == "value" else np.float32)
            assert array.dtype == expected.dtype
            assert array.tobytes() == expected.tobytes(), (name, kind)


def test_16_bit_value_is_its_rounded_master_weight(first):
    """Otherwise, a resumed run would differ from an uninterrupted one."""
    for dtype in ("float16", "bfloat16"):
        known = stored(first(dtype))
        for (name, kind), array in known.items():
            if kind == "value":
                master = known[name, "master"]
                assert array.tobytes() == master.astype(TYPES[dtype]).tobytes()
                assert (array.astype(np.float32) != master).any(), name


def test_manifest_names_bfloat16(first):
    opened = first("bfloat16")
    manifest = json.loads((opened.folder / "manifest.json").read_text())
    names = {tuple(piece[1:3]) for file in manifest["files"] for piece in file["pieces"]}
    wide = {(kind, "<f4") for kind in ("master", "first", "second")}
    assert names == {("value", "bfloat16"), *wide}
    tensors = about(opened)["tensors"]
    assert {tensor["dtype"] for tensor in tensors} == {"bfloat16"}
    size = sum(np.prod(tensor["shape"]) for tensor in tensors)
    assert sum(tensor["bytes"] for tensor in tensors) == 14 * size


@pytest.mark.parametrize("name", ["<V2", "V2", "<f1", "bfloat", "float32", ">f4", "|O", 7, None])
def test_unknown_dtype_name_is_rejected(first, tmp_path, name):
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    for path in first("bfloat16").folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["pieces"][0][2] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="an invalid piece"):
        Checkpoint(folder)


def test_export_and_import_use_the_master_weights(first, tmp_path):
    """A 16-bit run that starts from 32-bit weights keeps all their bits in its master weights."""
    opened = first("bfloat16")
    known = stored(opened)
    export(opened, tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    table = weights["transformer.wte.weight"]
    assert table.dtype == np.float32
    assert table.tobytes() == known["embedding.token", "master"].tobytes()

    source = Pretrained(tmp_path / "exported")
    config = configured(source, [])
    config = replace(config, train=replace(config.train, dtype="float16"))
    begin(tmp_path / "begun", config, source.parameter)
    begun = Checkpoint(tmp_path / "begun" / "checkpoints" / "step-00000000")

    def resumed(trainer):
        restore(begun, trainer.parameters, trainer.optimizer)

    found = stored(wrote(tmp_path / "resumed", LAYOUTS[0], "bfloat16", resumed))
    for (name, kind), array in known.items():
        if kind in ("value", "master"):
            assert found[name, kind].tobytes() == array.tobytes(), (name, kind)


LEARNED = "layers=2 hidden=32 heads=4 sequence=16 batch=8 steps=100 microbatches=2 vocabulary=29"


class Counting:
    """Batches whose sequences count up from different tokens, which a model learns quickly."""

    def __init__(self, config):
        self.shape, self.vocabulary = (config.train.batch, config.model.sequence), 29

    def batch(self, step):
        first = np.random.default_rng(step).integers(0, self.vocabulary, (self.shape[0], 1))
        tokens = (first + np.arange(self.shape[1] + 1)) % self.vocabulary
        return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def losses(line, dtype):
    config = config_of(f"{LEARNED} dtype={dtype} learning_rate=0.003 {line}")

    def rank(mesh):
        batches = Counting(config) if mesh.rank == 0 else None
        trainer = Trainer(mesh, config, config.model.vocabulary, batches)
        return [trainer.step(number).loss for number in range(config.train.steps)]

    return np.array(run(config.sizes(), rank)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "dtype"),
    strided(
        [*product(["schedule=none", "d=2 x=2 zero=1 scheme=1d"], ["float16", "bfloat16"])],
        3,
    ),
)
def test_hundred_16_bit_steps_end_within_one_percent_of_float32(line, dtype):
    theirs, ours = losses(line, "float32"), losses(line, dtype)
    assert theirs[-10:].mean() < 0.7 * theirs[0]  # it has learned something
    np.testing.assert_allclose(ours[-10:].mean(), theirs[-10:].mean(), rtol=0.01)


@pytest.mark.parametrize("kind", ["kind=gpt2", "kind=bert"])
def test_bfloat16_loss_matches_torch(kind):
    """The loss is torch's loss of the same rounded weights, and near the float32 loss."""
    config = config_of(f"{SERIAL} layers=2 batch=24 dtype=bfloat16 steps=1 {kind}")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        weights = {item.name: item.value.astype(np.float32) for item in trainer.parameters}
        return trainer.shape, weights, trainer.step(0).loss

    ((shape, weights, ours),) = run({}, rank)
    tokens, targets = (torch.tensor(each) for each in Tokens(config).batch(0))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = {name: torch.tensor(value).to(dtype) for name, value in weights.items()}
        found[dtype] = torch_reference.loss(given, shape, tokens, targets).item()
    np.testing.assert_allclose(ours, found[torch.float32], rtol=2e-3)
    np.testing.assert_allclose(ours, found[torch.bfloat16], rtol=2.0**-7)


class OneBatch(Tokens):
    """Batches that are the same in every step, which a model memorizes."""

    def batch(self, step):
        return super().batch(0)


RATES = {"lion": 1e-3, "sgd": 0.3, "muon": 0.01}


def learned(optimizer, dtype):
    """Return the losses of some steps on one batch."""
    line = f"optimizer={optimizer} learning_rate={RATES.get(optimizer, 3e-3)} steps=4 layers=1"
    sizes = "hidden=256 heads=16 batch=12 schedule=none microbatches=1"
    config = config_of(f"{line} {sizes} dtype={dtype}")

    def rank(mesh):
        trainer = Trainer(mesh, config, config.model.vocabulary, OneBatch(config))
        return [trainer.step(number).loss for number in range(config.train.steps)]

    return np.array(run({}, rank)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", strided(["bfloat16", "float16"], 2, days=1))
@pytest.mark.parametrize("optimizer", strided(OPTIMIZERS, 99, 1))
def test_every_optimizer_learns_in_16_bits_as_in_float32(optimizer, dtype):
    """Its updates change the values, not only the master weights."""
    wide, narrow = learned(optimizer, "float32"), learned(optimizer, dtype)
    assert wide[-1] < 0.6 * wide[0], wide
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=0.02 * wide[0])
