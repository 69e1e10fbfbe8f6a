"""Local updates: workers, agreements, and every layout of a worker."""

import numpy as np
import pytest
import torch

from hpc3d.benchmarks import torch_reference
from hpc3d.checkpoints.inspect import problems
from hpc3d.checkpoints.resume import resume
from hpc3d.checkpoints.saver import Saver
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.comm.threads import run
from hpc3d.config.input_file import CheckpointConfig
from hpc3d.config.load import to_toml
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.predict.simulation.abstract_gpu import pool_of
from hpc3d.predict.simulation.count import ZeroBatches, every_rank, moved_by
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.training.gradient_compression import CompressionSpec
from hpc3d.training.optimizers.outer import agrees_after
from hpc3d.training.trainer import Trainer
from tests.checkpoints.killed_runs import ThreadJob
from tests.pipeline.mixes import (
    Tokens,
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
from tests.training.test_trainer import close, optimizer_of, scheduled

LOCAL = "d=2 schedule=none steps=5 local_steps=2 batch=24"
DILOCO = "outer_learning_rate=0.7 outer_momentum=0.9"
SGD = "optimizer=sgd learning_rate=0.3 weight_decay=0.2"


def test_workers_agree_every_h_steps_and_at_the_end():
    assert [number for number in range(8) if agrees_after(number, 3, 8)] == [2, 5, 7]


def averaged(models):
    return {name: sum(each[name].detach() for each in models) / len(models) for name in models[0]}


def copied(models):
    return [{name: value.detach().clone() for name, value in each.items()} for each in models]


class Agreement:
    """Agreements of `models` in torch; `agreed` has the agreed parameters, moved by `outer`."""

    def __init__(self, config, models, agreed, outer):
        self.models, self.agreed, self.outer = models, agreed, outer
        self.every, self.steps = config.parallel.local_steps, config.train.steps
        self.stale, self.starts = config.parallel.sync == "stale", []

    def after(self, step):
        if not agrees_after(step, self.every, self.steps):
            return
        if self.starts:
            self.agree(self.starts)
        self.starts = copied(self.models) if self.stale else []
        if not self.stale or step + 1 == self.steps:
            self.agree(copied(self.models))

    def agree(self, starts):
        """Move the agreed parameters, and add the later updates of each worker to them."""
        for name, mean in averaged(starts).items():
            self.agreed[name].grad = self.agreed[name].detach() - mean
        self.outer.step()
        for model, start in zip(self.models, starts):
            for name, value in self.agreed.items():
                model[name].data.copy_(value.data + (model[name].data - start[name]))


def reference(config, workers=2):
    """Return the losses, mean norms and final weights of workers in torch, which are averaged by
    torch's SGD with Nesterov momentum."""
    train, parallel = config.train, config.parallel
    (trainer,) = run({}, lambda mesh: trainer_of(mesh, config_of(alone(LOCAL))))
    models = [torch_reference.weights_of(trainer.parameters) for _ in range(workers)]
    inner = [optimizer_of(each, train) for each in models]
    schedules = [scheduled(each, train.decay, train.steps, train.warmup) for each in inner]
    agreed, momentum = torch_reference.weights_of(trainer.parameters), parallel.outer_momentum
    outer = torch.optim.SGD(
        agreed.values(), parallel.outer_learning_rate, momentum, nesterov=momentum > 0
    )
    totals, agreement = [], Agreement(config, models, agreed, outer)
    for step in range(train.steps):
        tokens, targets = Tokens(config).batch(step)
        rows, found = len(tokens) // workers, []
        for number, (weights, optimizer) in enumerate(zip(models, inner)):
            mine = slice(number * rows, (number + 1) * rows)
            share = (targets[mine] != IGNORE).sum() / (targets != IGNORE).sum()
            optimizer.zero_grad()
            part = torch.tensor(tokens[mine]), torch.tensor(targets[mine])
            loss = workers * share * torch_reference.loss(weights, trainer.shape, *part)
            loss.backward()
            limit = train.clip or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), limit)
            found.append((loss.item(), norm.item()))
            optimizer.step()
        totals.append(tuple(np.mean(found, 0)))
        for schedule in schedules:
            schedule.step()
        agreement.after(step)
    return Trained(totals, {name: (None, w.detach().numpy()) for name, w in agreed.items()})


@pytest.mark.parametrize("inner", ["clip=0.5", f"{SGD} clip=0", f"{SGD} clip=2.5"])
@pytest.mark.parametrize("outer", ["", DILOCO, "outer_learning_rate=0.5"])
@pytest.mark.parametrize(
    "how", ["", "sync=stale", "sync=stale local_steps=1", "sync=stale local_steps=3 bucket_mb=0"]
)
def test_local_updates_match_torch(inner, outer, how):
    config = config_of(f"{LOCAL} {inner} {outer} {how}")
    found, expected = run(config.sizes(), lambda mesh: train(mesh, config)), reference(config)
    for each in found:
        close(each, expected)
    cover(found, expected)


def test_averaging_after_every_step_with_sgd_equals_synchronous_training():
    line = f"{SGD} clip=0 steps=5 batch=24"
    config = config_of(f"{line} d=4 schedule=none local_steps=1")
    expected = serial(line)
    for found in run(config.sizes(), lambda mesh: train(mesh, config)):
        losses, _ = zip(*found.totals, strict=True)
        np.testing.assert_allclose(losses, [loss for loss, _ in expected.totals], rtol=1e-12)
        for name, (where, block) in found.weights.items():
            np.testing.assert_allclose(block, expected.weights[name][1][where], atol=1e-12)


# Layouts of two workers, which train equally.
LAYOUTS = """
d=4 shard=2 zero=1
d=4 shard=2 zero=2
d=4 shard=2 zero=3 x=2 hidden=36
d=4 shard=4 zero=1
p=2 d=2 schedule=1f1b bucket_mb=0
p=2 d=4 shard=2 zero=3 schedule=v-half chunks=2 tied=false
d=2 c=2 zero=1 sequence=4
d=2 x=2 y=2 z=2 bucket_mb=0.01
d=2 x=2 y=2 scheme=2d-summa zero=1 optimizer=muon
d=4 shard=2 x=2 zero=1 optimizer=muon
d=2 x=2 y=2 z=2 scheme=3d-broadcast
d=2 e=2 experts=4 top_k=2 capacity=0 balance_bias=0.01
d=4 shard=2 e=2 experts=4 zero=3 capacity=0
d=2 y=2 kind=llama kv_heads=4 ffn=48 optimizer=adafactor
d=2 y=2 kind=llama kv_heads=4 ffn=48 optimizer=lion
d=2 z=2 offload='["optimizer","parameters"]'
d=2 x=2 kind=bert padding=4
""".strip().splitlines()


STALE = "local_steps=2 sync=stale steps=5"  # three agreements, the last of which is not stale


@pytest.mark.parametrize("how", ["local_steps=2 steps=3", STALE])
@pytest.mark.parametrize("line", LAYOUTS)
def test_result_does_not_depend_on_the_layout_of_a_worker(line, how):
    words = f"batch=24 {DILOCO} {how} {line}"
    words = words if "schedule" in line else f"schedule=none {words}"
    workers = 1 if "shard=4" in line else 2
    plain = config_of(f"{alone(words)} d={workers} schedule=none {how} {DILOCO}")
    (expected, *_) = run(plain.sizes(), lambda mesh: train(mesh, plain))
    config = config_of(words)
    found = run(config.sizes(), lambda mesh: train(mesh, config))
    for each in found:
        same(each, expected)
    cover(found, expected)


@pytest.mark.parametrize(
    "words", ["compression=powersgd compression_rank=400", "compression=top-k compression_share=1"]
)
@pytest.mark.parametrize("sync", ["blocking", "stale"])
def test_lossless_compression_of_outer_gradients_changes_nothing(words, sync, monkeypatch):
    monkeypatch.setattr(CompressionSpec, "saves", lambda *given: True)
    line = f"{LOCAL} {DILOCO} c=2 sequence=4 sync={sync}"
    plain, config = config_of(line), config_of(f"{line} {words}")
    (expected, *_) = run(plain.sizes(), lambda mesh: train(mesh, plain))
    for found in run(config.sizes(), lambda mesh: train(mesh, config)):
        np.testing.assert_allclose(found.totals, expected.totals, rtol=1e-8)


@pytest.mark.parametrize("line", ["d=2", "d=4", "d=4 shard=2 zero=1"])
def test_bytes_and_memory_of_an_agreement(line):
    """Ranks receive 2 (1 - 1/W) times their shards of the parameters, and store them once more
    for each outer state."""
    local = config_of(f"schedule=none steps=4 local_steps=2 {line} {DILOCO}")
    other = config_of(f"schedule=none steps=4 local_steps=3 {line} outer_learning_rate=0.5")
    held = [every_rank(config, 29) for config in (local, other)]
    workers = local.workers
    for agreeing, without in zip(*held, strict=True):
        shards = (agreeing.peak["optimizer"] - without.peak["optimizer"]) // 8
        moved = {key[:2]: nbytes for key, (_, nbytes) in agreeing.moved().items()}
        assert moved["r", "all_reduce"] == 2 * (workers - 1) * shards * 8 // workers
        assert all(axis != "r" for axis, *_ in without.moved())
        assert agreeing.peak["optimizer"] == 4 * shards * 8  # two moments of AdamW, two outer ones


ROUND = "schedule=none steps=16 local_steps=4 sync=stale bucket_mb=0.01"


def rounds(config):
    """Return, for each step of a rank: the calls along r, their bytes, and the peaks of memory."""
    recorder = MemoryRecorder(0, lambda: 0)
    mesh = abstract_mesh(config.sizes(), dict.fromkeys(config.sizes(), 0), pool_of(config))
    trainer = Trainer(mesh.traced(recorder), config, 29, None, feed=ZeroBatches)
    for number in range(config.train.steps):
        recorder.clear()
        trainer.step(number)
        axes = [group["axis"] for group in recorder.header["groups"]]
        calls = moved_by(recorder.rows(), axes).get(("r", "all_reduce"), (0, 0))
        yield *calls, dict(trainer.mesh.pool.peak)


@pytest.mark.parametrize("line", ["d=2", "d=4 reduce_dtype=float32", "d=4 shard=2 zero=1"])
def test_bytes_messages_and_memory_of_a_stale_agreement(line):
    """The buckets are spread over the steps, and the parameters are stored once more."""
    config = config_of(f"{ROUND} {line}")
    steps, (other, *_) = [*rounds(config)], rounds(config_of(f"{ROUND} {line} sync=blocking"))
    workers, sent = config.workers, 4 if "reduce_dtype" in line else 8
    shards = steps[-1][2]["optimizer"] - other[2]["optimizer"]
    assert steps[-1][2]["optimizer"] == 4 * shards
    received = 2 * (workers - 1) * shards // 8 * sent // workers
    calls, nbytes, peaks = zip(*steps, strict=True)
    assert sum(nbytes[:4]) == 0
    assert sum(nbytes[4:8]) == sum(nbytes[8:12]) == pytest.approx(received, abs=calls[4] * 8)
    buckets = sum(calls[4:8])
    assert buckets > 8 and calls[4:8] == calls[8:12]
    assert max(calls[4:8]) <= buckets / 4 + 2
    assert max(nbytes[4:8]) <= 0.5 * received  # a bucket can span two steps
    flying = max(peak["communication"] for peak in peaks[4:12]) - peaks[0]["communication"]
    assert flying <= 2 * 0.6 * shards // 8 * sent


def test_one_bucket_is_in_flight_for_all_local_steps():
    config = config_of(f"{ROUND} d=2 bucket_mb=25")
    calls, *_ = zip(*rounds(config), strict=True)
    assert [*calls] == [0] * 7 + [1, 0, 0, 0] * 2 + [2]


# Steps that are skipped, and checkpoints


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_only_the_worker_whose_gradient_overflows_skips_the_update():
    """The loss scale and the number of updates are the same on all workers."""
    config = config_of(f"{LOCAL} dtype=float16 layers=1")

    def rank(mesh):
        trainer = Trainer(mesh, config, config.model.vocabulary, batches_of(mesh, config))
        total = trainer.parameters.sum_of_squares
        trainer.parameters.sum_of_squares = lambda: np.inf if mesh.rank == 1 else total()
        before = trainer.parameters.value.copy()
        trainer.step(0)
        moved = not np.array_equal(before, trainer.parameters.value)
        trainer.step(1)
        states = trainer.parameters.value.copy(), trainer.scaling.factor, trainer.optimizer.steps
        return moved, states

    (first, (value, *counts)), (second, (other, *others)) = run(config.sizes(), rank)
    assert (first, second) == (True, False)
    assert counts == others == [2.0**14, 2]
    np.testing.assert_array_equal(value, other)


def batches_of(mesh, config):
    return Tokens(config) if mesh.rank == 0 else None


def run_to(folder, config, stop, said):
    """Resume the run in `folder` if it has a checkpoint, and save it after step `stop`."""
    header = {"run_id": "run", "config": to_toml(config), "position": None}

    def rank(mesh):
        trainer, start = trainer_of(mesh, config), 0
        if any((folder / "checkpoints").glob("step-*")):
            start = resume(ThreadJob(mesh), folder, trainer, said.append)
        saver = Saver(folder, trainer, CheckpointConfig(every=1), lambda _: header, str)
        for number in range(start, stop):
            trainer.step(number)
        saver.save(stop)
        saver.wait()
        return trained_of(trainer, []).weights

    found = run(config.sizes(), rank)
    assert not problems(folder / "checkpoints" / f"step-{stop:08d}")
    return found


@pytest.mark.parametrize(
    "line",
    [
        f"{LOCAL} {DILOCO}",
        f"{LOCAL} {SGD} p=2 schedule=1f1b",
        f"{LOCAL} d=4 shard=2 zero=3 dtype=bfloat16 optimizer=adamw-8bit hidden=36",
        f"{LOCAL} e=2 experts=4 balance_bias=0.01 optimizer=muon {DILOCO}",
        f"{LOCAL} {DILOCO} sync=stale bucket_mb=0.01",
        f"{LOCAL} {DILOCO} sync=stale local_steps=3 bucket_mb=0.01 p=2 schedule=1f1b",
        f"{LOCAL} sync=stale d=4 shard=2 zero=3 dtype=bfloat16 optimizer=adamw-8bit hidden=36",
        f"{LOCAL} sync=stale local_steps=1 compression=powersgd compression_rank=2",
        f"{LOCAL} sync=stale e=2 experts=4 balance_bias=0.01 optimizer=muon {DILOCO}",
    ],
)
@pytest.mark.parametrize("stops", [[1, 5], [2, 3, 5]])
def test_resumed_run_equals_an_uninterrupted_one(line, stops, tmp_path):
    """Checkpoints are at an agreement and between agreements."""
    config, said = config_of(line), []
    for stop in stops:
        found = run_to(tmp_path / "run", config, stop, said)
    for ours, theirs in zip(found, run_to(tmp_path / "whole", config, 5, []), strict=True):
        for name, (_, block) in ours.items():
            np.testing.assert_array_equal(block, theirs[name][1])
    assert not [line for line in said if "mean" in line]


@pytest.mark.parametrize(("sync", "stop"), [("blocking", 1), ("stale", 3)])
def test_another_number_of_workers_continues_from_the_mean(sync, stop, tmp_path):
    """The mean of 4 workers between agreements, and the states of workers 0 and 1."""
    four, said = config_of(f"{LOCAL} {SGD} d=4 {DILOCO} sync={sync}"), []
    weights = run_to(tmp_path, four, stop, said)
    mean = {name: np.mean([each[name][1] for each in weights], 0) for name in weights[0]}
    single = "local_steps=0 outer_learning_rate=1 outer_momentum=0 sync=blocking"
    for words in (f"d=2 sync={sync}", f"d=1 sync={sync}", f"d=2 {single}"):
        config, said = config_of(f"{LOCAL} {SGD} {DILOCO} {words}"), []

        def rank(mesh, config=config, said=said):
            trainer = trainer_of(mesh, config)
            resume(ThreadJob(mesh), tmp_path, trainer, said.append)
            return {item.name: item.value.copy() for item in trainer.parameters}

        for found in run(config.sizes(), rank):
            for name, block in found.items():
                np.testing.assert_allclose(block, mean[name], rtol=1e-14, err_msg=name)
        assert [line for line in said if "mean parameters of 4 workers" in line]


def test_another_number_of_workers_applies_the_mean_of_the_agreement_in_flight(tmp_path):
    """The deviations of 4 workers, whose mean is not 0 because of the outer momentum."""
    line, found = f"{LOCAL} {SGD} {DILOCO} sync=stale local_steps=3", {}
    for workers, folder in ((4, tmp_path), (4, tmp_path), (2, tmp_path)):
        config = config_of(f"{line} d={workers}")

        def rank(mesh, config=config, folder=folder):
            trainer = trainer_of(mesh, config)
            resume(ThreadJob(mesh), folder, trainer, str)
            states = trainer.optimizer.states["deviation"], trainer.optimizer.states["agreed"]
            return [each.copy() for each in states]

        if not found:
            run_to(folder, config, 4, [])
        found[workers] = run(config.sizes(), rank)
    mean = np.mean([deviation for deviation, _ in found[4]], 0)
    assert abs(mean).max() > 1e-3
    for deviation, agreed in found[2]:
        np.testing.assert_allclose(deviation, mean, rtol=1e-12, atol=1e-15)
        np.testing.assert_array_equal(agreed, found[4][0][1])


def test_no_agreement_is_in_flight_after_the_last_step():
    config = config_of(f"{LOCAL} {DILOCO} sync=stale")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        moved = []
        for number in range(config.train.steps):
            trainer.step(number)
            moved.append(bool(trainer.optimizer.states["deviation"].any()))
        return moved, [*trainer.outer.waiting, *trainer.outer.in_flight]

    assert run(config.sizes(), rank) == [([False, True, True, True, False], [])] * 2


def test_saving_completes_the_agreement_in_flight_and_changes_no_value():
    """Saved arrays are independent of the buckets, and the run does not depend on saving."""
    configs = [
        config_of(f"{LOCAL} {DILOCO} sync=stale local_steps=4 bucket_mb={size}")
        for size in (0, 25)
    ]

    def rank(mesh, config, saves):
        trainer = trainer_of(mesh, config)
        held = []
        for number in range(config.train.steps):
            trainer.step(number)
            if number == 3:
                assert trainer.outer.waiting or trainer.outer.in_flight
            if saves:
                trainer.outer.complete()
                assert not trainer.outer.waiting and not trainer.outer.in_flight
                held.append(trainer.optimizer.states["deviation"].copy())
        return trained_of(trainer, []).weights, held

    first, second = (
        run(config.sizes(), lambda mesh, config=config: rank(mesh, config, True))
        for config in configs
    )
    unsaved = run(configs[0].sizes(), lambda mesh: rank(mesh, configs[0], False))
    for (weights, held), (others, kept), (plain, _) in zip(first, second, unsaved, strict=True):
        for name, (_, block) in weights.items():
            np.testing.assert_array_equal(block, plain[name][1])
            np.testing.assert_allclose(block, others[name][1], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(held, kept, rtol=1e-12, atol=1e-14)
