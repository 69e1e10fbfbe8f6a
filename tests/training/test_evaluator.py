"""Evaluation during training: equal losses on all meshes, and unchanged training."""

import os
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpc3d.benchmarks import torch_reference
from hpc3d.comm.threads import run
from hpc3d.config.input_file import Config
from hpc3d.data.validation import ValidationBatches
from hpc3d.model import layers
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.pipeline.program import STEP, forward_program_of, program_of
from hpc3d.training import evaluator as module
from hpc3d.training.evaluator import (
    Best,
    Evaluation,
    Evaluator,
    FrozenEvaluator,
    FrozenModel,
    restored,
)
from tests.data.test_batches import Numbers
from tests.pipeline.mixes import MIXES, Tokens, alone, config_of, ranks, trained_of, trainer_of
from tests.strided import covering, strided

STEPS = 2


class Counted(Tokens):
    """Two batches in which every microbatch has targets."""

    count = 2


class Held:
    """Two batches with ignored targets; the second ends with sequences of ignored targets only."""

    count = 2

    def __init__(self, config):
        self.tokens = Tokens(config)

    def batch(self, number):
        tokens, targets = self.tokens.batch(1000 + number)
        targets = targets.copy()
        targets[len(targets) // (1 + number) :] = IGNORE
        return tokens, targets


def evaluator_of(trainer):
    batches = Held(trainer.config) if trainer.mesh.rank == 0 else None
    return Evaluator(trainer, batches and [batches])


def frozen_evaluation(trainer):
    """Return the evaluation of a FrozenModel with the weights of a trainer."""
    model = FrozenModel(trainer.mesh, trainer.config)
    values = {item.name: item.value for item in trainer.parameters}
    for item in model.parameters:
        item.value[...] = values[item.name]
    batches = Held(trainer.config) if trainer.mesh.rank == 0 else None
    return FrozenEvaluator(model, batches and [batches]).evaluate(trainer.number)


def test_microbatches_without_targets_are_skipped():
    """The second batch has targets in the first half of its 48 sequences."""
    config, passes = config_for("p=2 schedule=gpipe microbatches=4"), []

    def rank(mesh):
        evaluator = FrozenEvaluator(FrozenModel(mesh, config), None)
        execute = evaluator.engine.execute
        evaluator.engine.execute = lambda each: (passes.append(each), execute(each))
        evaluator.batches = [Held(config) if mesh.rank == 0 else None]
        evaluator.counts = [Held.count]
        return evaluator.evaluate(0).loss

    first, second = run(config.sizes(), rank)
    assert first == second > 0
    counts = Counter((each.op, each.mb) for each in passes)
    assert {mb: counts["F", mb] for mb in range(4)} == {0: 4, 1: 4, 2: 2, 3: 2}


def blocks_of(trainer):
    mesh = trainer.mesh
    return {
        item.name: (item.layout.slices(item.shape, mesh), item.value.copy())
        for item in trainer.parameters
    }


def trained(config, evaluate=True):
    """Return, for each rank, the evaluation and the weights after each step, and its training."""

    def rank(mesh):
        trainer, found, weights, steps = trainer_of(mesh, config), [], [], []
        evaluator = evaluator_of(trainer)
        for number in range(STEPS):
            steps.append(trainer.step(number))
            found += [evaluator.evaluate(number)] if evaluate else []
            weights.append(blocks_of(trainer))
        if evaluate:
            assert frozen_evaluation(trainer)[:4] == found[-1][:4]
        return found, weights, trained_of(trainer, steps)

    return run(config.sizes(), rank)


def numbers(evaluations):
    return np.array([each[:4] for each in evaluations])


def same_bits(found, expected):
    assert found.totals == expected.totals
    for name, (_, block) in found.weights.items():
        assert np.array_equal(block, expected.weights[name][1]), name


def config_for(line):
    return config_of(f"steps={STEPS} {line}")


@cache
def serial(line):
    ((found, weights, _),) = trained(config_for(line))
    return numbers(found), weights


# Mixes of few ranks first: together they have every word of a mix.
LINES = covering(sorted((line for line in MIXES if "batch=" not in line), key=ranks))


@pytest.mark.parametrize("line", strided(LINES, 36, 4))
def test_evaluation_matches_one_rank_and_does_not_affect_training(line):
    config, (expected, _) = config_for(line), serial(alone(line))
    without = trained(config, evaluate=False)
    for (found, _, totals), (_, _, undisturbed) in zip(trained(config), without):
        np.testing.assert_allclose(numbers(found), expected, rtol=1e-10)
        same_bits(totals, undisturbed)


ASYNCHRONOUS = [
    "p=2 schedule=pipedream microbatches=4 clip=0 tied=false",
    "p=2 d=2 x=2 schedule=pipedream microbatches=3 clip=0 tied=false zero=1",
    "p=4 schedule=pipedream microbatches=2 clip=0 tied=false",
    "p=4 schedule=pipedream-2bw microbatches=4",
    "p=2 d=2 schedule=pipedream-2bw microbatches=2 zero=1",
]


@pytest.mark.parametrize("line", strided(ASYNCHRONOUS, 2))
def test_asynchronous_schedules_evaluate_the_newest_weights(line):
    """They are the weights of one rank after as many updates, although passes are in flight."""
    held = trained(config_for(line))
    alike, without = trained(config_for(line), evaluate=False), serial_of(line, held)
    for (found, _, totals), (_, _, undisturbed) in zip(held, alike):
        np.testing.assert_allclose(numbers(found), without, rtol=1e-10)
        same_bits(totals, undisturbed)


def serial_of(line, found_by):
    """Return the evaluations of one rank with the weights that all ranks have after a step."""

    def rank(mesh):
        trainer, found = trainer_of(mesh, config_for(alone(line))), []
        evaluator = evaluator_of(trainer)
        for number in range(STEPS):
            for item in trainer.parameters:
                for _, weights, _ in found_by:
                    if item.name in weights[number]:
                        where, block = weights[number][item.name]
                        item.value[where] = block[: len(item.value[where])]
            found.append(evaluator.evaluate(number))
        return numbers(found)

    return run({}, rank)[0]


@pytest.mark.parametrize("line", ASYNCHRONOUS)
def test_no_message_is_in_flight_at_the_end_of_a_step(line):
    """Otherwise, it could be mistaken for a message of an evaluation."""
    config = config_for(line)
    program = program_of(config)
    on_way = {}
    for stage in range(config.mesh.p):
        for number, groups in enumerate(program.steps(stage)):
            assert groups[-1] == STEP or number == STEPS - 1
            for one in (one for group in groups for one in group):
                if one.op.startswith(("Send", "Recv")):
                    peer, other = program.placement.other(stage, one)
                    on_way.setdefault(frozenset([(stage, one), (peer, other)]), []).append(number)
    assert on_way and all(len({*steps}) == 1 for steps in on_way.values())


@pytest.mark.parametrize("kind", ["", "tied=false gelu=exact", "kind=llama kv_heads=4 ffn=48"])
def test_evaluation_matches_torch(kind, monkeypatch):
    logits, entropy = [], functional.cross_entropy
    noted = lambda found, *given, **how: (logits.append(found), entropy(found, *given, **how))[1]  # noqa: E731
    monkeypatch.setattr(functional, "cross_entropy", noted)
    config = config_for(f"schedule=none {kind}")
    ((found, weights, _),) = trained(config)
    ((shape, names),) = run({}, lambda mesh: about(trainer_of(mesh, config)))
    for number in range(STEPS):
        values = {name: torch.tensor(weights[number][name][1]) for name in names}
        loss, right, count = 0.0, 0, 0
        for tokens, targets in map(Held(config).batch, range(Held.count)):
            tokens, targets = torch.tensor(tokens), torch.tensor(targets)
            valid = targets != IGNORE
            mean = torch_reference.loss(values, shape, tokens, targets).item()
            loss, count = loss + mean * int(valid.sum()), count + int(valid.sum())
            best = logits.pop().argmax(-1).reshape(targets.shape)
            right += int((best == targets)[valid].sum())
        expected = number, loss / count, count, right / count
        assert found[number][:4] == pytest.approx(expected, rel=1e-10)
    assert right


def about(trainer):
    return trainer.shape, [item.name for item in trainer.parameters]


def test_evaluation_disables_dropout_and_ignores_microbatches():
    plain, (expected, _) = "microbatches=6 dropout=0.25", serial("dropout=0.25")
    ((found, _, _),) = trained(config_for(plain))
    np.testing.assert_allclose(numbers(found), expected, rtol=1e-10)


@pytest.mark.parametrize(
    "line",
    ["schedule=none microbatches=2", "p=2 e=2 x=2 schedule=1f1b microbatches=2"],
)
def test_evaluation_excludes_router_losses(line):
    """In training, they are included."""

    def rank(mesh, config):
        trainer = trainer_of(mesh, config)
        return evaluator_of(trainer).evaluate(0).loss, trainer.step(0).loss

    mixture = f"{line} experts=4 top_k=2"
    factors = "balance_loss=0 z_loss=0", "balance_loss=2 z_loss=1"
    configs = [config_for(f"{mixture} {each}") for each in factors]
    plain, heavy = (
        run(config.sizes(), lambda mesh, config=config: rank(mesh, config)) for config in configs
    )
    for (without, trained_without), (found, trained_with) in zip(plain, heavy, strict=True):
        assert found == without
        assert trained_with > trained_without + 2


def planted(monkeypatch, fault):
    if fault == "dropout":
        mask = layers.Dropout.mask
        monkeypatch.setattr(
            layers.Dropout,
            "mask",
            lambda self, micro, *shape: mask(self, micro._replace(training=True), *shape),
        )
    elif fault == "ignored":
        monkeypatch.setattr(module, "count_targets", np.size)
    else:
        head = forward_program_of(config_for("p=2 schedule=gpipe microbatches=4"))
        monkeypatch.setattr(module, "forward_program_of", lambda config: fewer(head))


def fewer(program):
    """Omit the last microbatch on both stages."""
    stages = [[group for group in groups if group[0].mb != 3] for groups in program.stages]
    return program._replace(stages=stages)


@pytest.mark.parametrize("fault", ["dropout", "ignored", "a microbatch less"])
def test_planted_evaluation_faults_are_detected(fault, monkeypatch):
    rate = " dropout=0.25" * (fault == "dropout")
    line = f"p=2 schedule=gpipe microbatches=4{rate}"
    expected, _ = serial(alone(line))
    planted(monkeypatch, fault)
    for found, _, _ in trained(config_for(line)):
        assert not np.allclose(numbers(found)[:, 1], expected[:, 1], rtol=1e-6)


PEAKS = {
    "schedule=none microbatches=4": 0.5,
    "schedule=none microbatches=1 recompute=full": 1,
    "p=2 schedule=1f1b microbatches=4 recompute=selective": 0.5,
    "p=2 schedule=zb-v chunks=2 microbatches=8": 0.5,
    "p=2 d=2 schedule=interleaved chunks=2 microbatches=4 zero=3": 0.5,
    "x=2 y=2 schedule=none scheme=2d microbatches=2": 0.5,
}


@pytest.mark.parametrize(("line", "most"), strided(PEAKS.items(), 3))
def test_evaluation_uses_less_memory_than_a_step(line, most):
    """An evaluation also releases all of its memory."""

    def rank(mesh):
        trainer, pool = trainer_of(mesh, config_for(f"hidden=48 sequence=8 {line}")), mesh.pool
        evaluator = evaluator_of(trainer)
        trainer.step(0)
        step, before = pool.peak["all"], pool.live.total()
        pool.reset_peak()
        evaluator.evaluate(0)
        assert not pool.live["activation"] and not evaluator.engine.saved
        return step - before, pool.peak["all"] - before

    for step, evaluation in run(config_for(line).mesh.sizes(), rank):
        assert evaluation <= most * step


class Counting(Evaluator):
    """Evaluator with given losses."""

    def __init__(self, losses, **train):
        config = Config()
        self.trainer = type(
            "", (), {"config": replace(config, train=replace(config.train, **train))}
        )
        self.best, self.losses = None, iter(losses)

    def evaluate(self, number):
        return Evaluation(number, next(self.losses), 1, 0.5, 0.1)


def test_evaluation_runs_every_n_steps_and_after_the_last():
    evaluator = Counting([5.0, 4.0, float("nan"), 4.5], steps=10, eval_every=3)
    found = [evaluator.after(number) for number in range(10)]
    assert [each.step for each in found if each] == [2, 5, 8, 9]
    assert evaluator.best == Best(6, 4.0)


def test_non_finite_evaluation_is_never_the_best():
    assert Evaluation(0, 2.0, 1, 0, 0).perplexity == pytest.approx(7.389056)
    assert Evaluation(0, 1e4, 1, 0, 0).perplexity == float("inf")
    assert np.isnan(Evaluation(0, float("nan"), 1, 0, 0).perplexity)
    evaluator = Counting([float("nan")], steps=1, eval_every=1)
    evaluator.after(0)
    assert evaluator.best is None


@pytest.mark.parametrize(("section", "change"), [
    ("data", {"validation": "other.txt"}),
    ("train", {"batch": 8}),
    ("train", {"eval_batches": 1}),
    ("checkpoint", {"keep_best": True}),
])  # fmt: skip
def test_best_evaluation_is_reset_if_it_is_not_comparable(section, change):
    config, known = Config(), {"best": {"step": 3, "loss": 2.5}}
    assert restored(known, config, config) == Best(3, 2.5)
    assert restored({}, config, config) is None
    other = replace(config, **{section: replace(getattr(config, section), **change)})
    assert restored(known, config, other) is None


def test_best_evaluation_is_identified_by_the_text_hash():
    """It is identified by its hash, or by its absolute path in checkpoints of earlier versions."""

    def texts(sha256):
        return {"data.validation": {"sha256": sha256}}

    def config(path):
        return replace(Config(), data=replace(Config().data, validation=path))

    known = {"best": {"step": 3, "loss": 2.5}}
    a, b = config("a.txt"), config("b.txt")
    assert restored(known | {"texts": texts("1")}, a, b, texts("1")) == Best(3, 2.5)
    assert restored(known | {"texts": texts("1")}, a, a, texts("2")) is None
    assert restored(known, a, config(os.path.abspath("a.txt")), texts("1")) == Best(3, 2.5)
    assert restored(known, a, b, texts("1")) is None


def test_best_evaluation_of_a_held_out_fraction_is_identified_by_the_training_texts():
    """The order counts, because the held-out parts are evaluated as one text."""
    config = replace(Config(), data=replace(Config().data, validation=0.1))
    two = {"data.path[0]": {"sha256": "1"}, "data.path[1]": {"sha256": "2"}}
    turned = {"data.path[0]": {"sha256": "2"}, "data.path[1]": {"sha256": "1"}}
    one = {"data.path": {"sha256": "1"}}
    known = {"best": {"step": 3, "loss": 2.5}}
    for before, now in ((two, one), (one, two), (two, turned)):
        assert restored(known | {"texts": before}, config, config, now) is None
        assert restored(known | {"texts": now}, config, config, now) == Best(3, 2.5)
        assert restored(known, config, config, now) == Best(3, 2.5)
    config = replace(config, data=replace(config.data, validation=None))
    assert restored(known | {"texts": two}, config, config, one) == Best(3, 2.5)


def test_best_evaluation_of_several_texts_does_not_depend_on_their_order():
    known = {"best": {"step": 3, "loss": 2.5}}

    def config(*paths):
        return replace(Config(), data=replace(Config().data, validation=paths))

    def texts(*digests):
        return {f"data.validation[{n}]": {"sha256": each} for n, each in enumerate(digests)}

    header = known | {"texts": texts("1", "2")}
    both = config("a.txt", "b.txt")
    assert restored(header, both, both, texts("2", "1")) == Best(3, 2.5)
    assert restored(header, both, config("a.txt"), {"data.validation": {"sha256": "1"}}) is None
    assert restored(header, both, both, texts("1", "3")) is None


def test_loss_of_several_texts_is_the_mean_of_their_losses():
    """Each text has the same weight, and the loss that it has in isolation, on any layout."""
    config = config_for("p=2 d=2 schedule=gpipe microbatches=2 vocabulary=41")
    texts = [ValidationBatches(Numbers(length), 3, 48, 0) for length in (31, 7, 400)]

    def rank(mesh):
        trainer, first = trainer_of(mesh, config), mesh.rank == 0
        every = Evaluator(trainer, texts if first else None, texts=3).evaluate(1)
        each = [Evaluator(trainer, [text] if first else None).evaluate(1) for text in texts]
        return every, each

    for every, each in run(config.sizes(), rank):
        assert [found[:4] for found in every.texts] == [found[:4] for found in each]
        assert [found.tokens for found in each] == [30, 6, 399] and every.tokens == 435
        assert every.loss == pytest.approx(np.mean([found.loss for found in each]), rel=1e-12)
        assert every.accuracy == pytest.approx(np.mean([found.accuracy for found in each]))
        assert len({found.loss for found in each}) == 3 and every.step == 1
        assert every.seconds == sum(found.seconds for found in every.texts)


def test_uneven_last_batch_is_averaged_over_its_tokens():
    """10 windows in batches of 48 and of 2 give the same loss."""
    losses = []
    for batch in (48, 2):
        config = config_of(f"steps=1 batch={batch} vocabulary=41")

        def rank(mesh, config=config):
            trainer = trainer_of(mesh, config)
            held = ValidationBatches(Numbers(31), 3, config.train.batch, 0)
            return Evaluator(trainer, [held]).evaluate(0)

        losses += run({}, rank)
    assert [each.tokens for each in losses] == [30, 30]
    assert losses[0].loss == pytest.approx(losses[1].loss, rel=1e-12)
