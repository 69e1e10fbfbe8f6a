"""Checkpoints and guards of runs on devices that are threads (tests/fakes/fake_device.py): results
equal those of NumPy, and no host arrays are mixed in."""

import ctypes
import re
from contextlib import nullcontext

import numpy as np
import pytest
from safetensors.numpy import load_file

import tests.test_device  # noqa: F401  the rules of the model's kernels
from hpc3d.arrays.pool import from_host, to_host
from hpc3d.checkpoints.hf_export import export
from hpc3d.checkpoints.hf_import import Pretrained, configured
from hpc3d.checkpoints.new_run import begin
from hpc3d.checkpoints.resume import resume
from hpc3d.checkpoints.saver import Saver
from hpc3d.checkpoints.sharded import Checkpoint, Snapshot, restore, steps_of
from hpc3d.comm import nccl, threads
from hpc3d.config.input_file import CheckpointConfig
from hpc3d.config.load import to_toml
from hpc3d.training.evaluator import FrozenEvaluator, FrozenModel
from hpc3d.training.guard import Corrupt, GuardError, NotFinite, ReplicaCheck
from tests.checkpoints import drawn_models
from tests.checkpoints.killed_runs import ThreadJob
from tests.comm.test_checker import flip
from tests.fakes import fake_device
from tests.fakes.fake_device import DeviceArray, DevicePool, on_device, plain
from tests.pipeline.mixes import Trained, alone, config_of, cover, same, serial, trainer_of
from tests.training.test_evaluator import Held

slow = pytest.mark.slow
MODEL = "layers=2 batch=24 steps=4"
STEPS = 2  # before a checkpoint
TYPES = {number: name for name, number in nccl.TYPES.items()}


def written(array, values):
    assert type(values) is np.ndarray
    array[...] = values.view(DeviceArray)


to_host.register(DeviceArray, lambda array: plain(array).copy())
from_host.register(DeviceArray, written)


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """Devices that accept host arrays, and all types that NCCL supports."""

    def bring(pool, host):
        host = np.asarray(host)
        array = pool.empty(host.shape, host.dtype)
        from_host(array, host)
        return array

    def array_at(pointer, count, number):
        dtype = np.dtype(TYPES[number])
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(pointer)
        return np.frombuffer(memory, dtype)

    monkeypatch.setattr(DevicePool, "bring", bring)
    monkeypatch.setattr(fake_device, "array_at", array_at)


def ranks(config, function, transport):
    """Call `function(mesh)` on every rank, with NumPy arrays or on devices."""
    sizes = config.sizes()
    beside = threads.meshes(sizes)[0]

    def rank(mesh):
        here = on_device(mesh, beside[mesh.rank], transport) if transport else nullcontext(mesh)
        with here as where:
            return function(where)

    return threads.run(sizes, rank)


def life(folder, line, transport, until):
    """Train a run up to step `until`, from its newest checkpoint, and one more step; return what
    each rank has Trained."""
    config = config_of(f"{MODEL} {line}")
    header = {"run_id": folder.name, "config": to_toml(config), "position": None}
    begun = steps_of(folder / "checkpoints")

    def rank(mesh):
        trainer, said = trainer_of(mesh, config), []
        start = resume(ThreadJob(mesh), folder, trainer, said.append) if begun else 0
        saver = Saver(
            folder, trainer, CheckpointConfig(every=until), lambda _: header, said.append
        )
        steps = []
        for number in range(start, until):
            steps.append(trainer.step(number))
            saver.after(number)
        saver.wait()
        assert type(trainer.parameters.value) is (DeviceArray if transport else np.ndarray)
        copied = Snapshot(trainer.parameters, trainer.optimizer).arrays
        assert {type(array) for array in copied} <= {np.ndarray}
        weights = {
            item.name: (item.layout.slices(item.shape, mesh), plain(to_host(item.value)))
            for item in trainer.parameters
        }
        return Trained([(step.loss, step.grad_norm) for step in steps], weights)

    return ranks(config, rank, transport)


CUBE = "x=2 y=2 z=2 scheme=3d microbatches=2"
SHARDED = "d=3 y=3 zero=3 microbatches=2"
STAGES = "p=2 d=2 schedule=1f1b microbatches=2 zero=1"
BROADCAST = "x=2 y=2 z=2 scheme=3d-broadcast microbatches=1"


@pytest.mark.parametrize(
    ("before", "there", "after", "here"),
    [
        (STAGES, "nccl", SHARDED, "nccl"),
        pytest.param(SHARDED, "host-staged", "microbatches=2", None, marks=slow),
        ("x=2 scheme=1d microbatches=2", None, STAGES, "host-staged"),
        pytest.param(CUBE, "nccl", STAGES, "nccl", marks=slow),
        pytest.param(BROADCAST, "nccl", CUBE, None, marks=slow),
        pytest.param("d=3 y=3 zero=2 microbatches=2", None, BROADCAST, "nccl", marks=slow),
    ],
)
def test_run_on_devices_resumes_as_on_numpy(tmp_path, before, there, after, here):
    life(tmp_path, before, there, STEPS)
    found = life(tmp_path, after, here, 4)
    expected = serial(alone(f"{MODEL} {before}"))
    rest = Trained(expected.totals[STEPS:], expected.weights)
    for trained in found:
        same(trained, rest)
    cover(found, rest)


@pytest.mark.parametrize("line", [STAGES, SHARDED])
def test_frozen_model_on_devices_is_evaluated_as_on_numpy(tmp_path, line):
    stored = Checkpoint(drawn_models.saved(tmp_path, MODEL))
    config = config_of(f"{MODEL} {line}")

    def rank(mesh):
        model = FrozenModel(mesh, config)
        restore(stored, model.parameters, None)
        batches = Held(config) if mesh.rank == 0 else None
        return type(model.parameters.value), FrozenEvaluator(
            model, batches and [batches]
        ).evaluate(0)[:4]

    expected = ranks(config, rank, None)
    for (kind, found), (_, numbers) in zip(ranks(config, rank, "nccl"), expected, strict=True):
        assert kind is DeviceArray
        assert found == pytest.approx(numbers, rel=1e-10)


def shards(folder):
    return {path.name: np.fromfile(path, "<f8") for path in folder.glob("rank-*.bin")}


def test_devices_save_the_same_values_as_numpy(tmp_path):
    """Compares each rank's file, the exported weights, and a run that starts from these weights.
    Sums on devices have another order."""
    found = {}
    for transport in ("nccl", None):
        folder = tmp_path / str(transport)
        life(folder, STAGES, transport, 1)
        step = folder / "checkpoints" / "step-00000001"
        export(Checkpoint(step), folder / "exported")
        weights = Pretrained(folder / "exported")
        config = configured(weights, ["--train.steps", "4", "--train.batch", "24"])
        begin(folder / "begun", config, weights.parameter)
        after = life(folder / "begun", "p=1 schedule=none", transport, 1)
        model = load_file(folder / "exported" / "model.safetensors")
        found[transport] = {**shards(step), **model, "totals": after[0].totals}
    assert len([name for name in found[None] if name.endswith(".bin")]) == 4
    assert found["nccl"].keys() == found[None].keys()
    for name, values in found[None].items():
        np.testing.assert_allclose(found["nccl"][name], values, rtol=1e-10, atol=1e-12)


LOCAL = "d=2 x=2 schedule=none microbatches=2 local_steps=2 outer_momentum=0.9"


@pytest.mark.parametrize("sync", ["blocking", "stale"])
def test_local_updates_on_devices_equal_those_on_numpy(sync, tmp_path):
    """The run resumes between two agreements, and has a third one after the last step."""
    line = f"{LOCAL} sync={sync}"
    for transport in ("nccl", None):
        life(tmp_path / str(transport), line, transport, 1)
    found, expected = (life(tmp_path / str(each), line, each, 4) for each in ("nccl", None))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.totals, theirs.totals, rtol=1e-10)
        for name, (_, block) in ours.weights.items():
            np.testing.assert_allclose(block, theirs.weights[name][1], rtol=1e-10, atol=1e-12)


class OnHost(ReplicaCheck):
    """Replica check that asserts that its hashes are in host memory."""

    def gathered(self, comm, hashes):
        found = super().gathered(comm, hashes)
        assert type(found) is np.ndarray
        return found


def hurt(line, fault, transport="nccl"):
    """Return the exception of each rank. Rank 1 calls `fault(trainer, number)` before each step,
    and the function that it returns after the step."""
    config = config_of(f"{MODEL} {line}")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        replicas = OnHost(trainer, 1)
        try:
            for number in range(2):
                then = fault(trainer, number) if mesh.rank == 1 else None
                trainer.step(number)
                if then:
                    then()
                replicas.after(number)
        except GuardError as wrong:
            return wrong
        return None

    return ranks(config, rank, transport)


def found_in(raised, kind):
    assert [type(each) for each in raised] == [kind] * len(raised), raised
    return [find.line for each in raised for find in each.found]


def named(trainer, name):
    return next(item for item in trainer.parameters if item.name.endswith(name))


@pytest.mark.parametrize("transport", ["nccl", "host-staged"])
def test_equal_replicas_pass_the_check(transport):
    line = "p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=1"
    assert hurt(line, lambda trainer, number: None, transport) == [None] * 8


@pytest.mark.parametrize(
    ("line", "kind", "name", "who"),
    [
        ("d=3 zero=0", "value", "up.weight", "rank 1: .*parameter .* ranks 0 1 2 along d differ"),
        ("x=3 scheme=1d", "second", "norm2.beta", "rank 1: .*second of .* 0 1 2 along x differ"),
        ("p=2 schedule=1f1b", "value", "token", "one of these ranks: .* ranks 0 1 along p differ"),
    ],
)
def test_bit_flip_in_a_replica_is_detected_and_named(line, kind, name, who):
    def fault(trainer, number):
        item = named(trainer, name)
        states = trainer.optimizer.states_of(item)
        held = {"value": item.value} | {spec.name: state for spec, state in states}
        block = held[kind]

        def then():
            plain(block)[...] = flip(plain(block), 3, 7)

        return then if number == 1 else None

    (text,) = found_in(hurt(line, fault), Corrupt)
    assert re.match(who, text)
    assert "step 1, " in text
    assert name in text


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kinds", "what"), [(["grad"], "gradient"), (["grad", "value"], "value")])
def test_nan_is_located(kinds, what):
    """NaNs in parameters are reported before those in gradients."""

    def fault(trainer, number):
        item, wait = named(trainer, "up.weight"), trainer.buckets.wait

        def spoilt():
            wait()
            for kind in kinds:
                getattr(item, kind)[0, 0] = np.nan

        if number == 1:
            trainer.buckets.wait = spoilt

    (text,) = found_in(hurt("x=2 scheme=1d microbatches=2", fault), NotFinite)
    place = r"rank 1: step 1, layer [01], up.weight: 1 of \d+ elements of its"
    assert re.match(f"{place} {what} are not finite", text)
