"""Random training configurations: each one matches one rank and torch, or is rejected."""

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import Phase, event, given, settings

from hpc3d.checkpoints.resume import resume
from hpc3d.checkpoints.saver import Saver
from hpc3d.comm.threads import run
from hpc3d.config.load import to_toml
from hpc3d.data.batches import Batches
from hpc3d.model.families import family_of
from hpc3d.ops.quantize import in_blocks
from hpc3d.pipeline.schedule import find
from hpc3d.training.optimizers.optimizer import MASTER
from hpc3d.training.trainer import gathers_later
from tests.checkpoints.killed_runs import ThreadJob
from tests.fakes.read_only import read_only
from tests.jobs import Case
from tests.pipeline.drawn import INEXACT, TORCH, cases, rendered
from tests.pipeline.in_torch import RULES
from tests.pipeline.mixes import (
    KEYS,
    WIDER,
    Trained,
    config_of,
    cover,
    ranks,
    same,
    trained_of,
    trainer_of,
    words_of,
)
from tests.strided import strided
from tests.training.test_evaluator import evaluator_of, frozen_evaluation

SAVED = 1  # steps that the first mix of two trains
NOISE = 1e-8  # of a bias; one step of a gradient that is not 0 is larger
FACTOR = 2.0**8  # loss scale at which no gradient overflows


def exact(line):
    """Return the words of a mix that leave its results exact."""
    inexact = {key for words in INEXACT for key in words}
    return rendered({k: v for k, v in words_of(line).items() if k not in inexact})


def alone(line):
    """Return the words of a mix that also apply to the serial model."""
    ours = "model.", "train.", "data."
    return rendered({k: v for k, v in words_of(line).items() if KEYS[k].startswith(ours)})


def train(mesh, config, steps, folder=None):
    """Train `steps` of a mix.

    In a `folder`, all parts except the first resume from a checkpoint, and all except the last
    save one. Returns the totals of every step and the weights.
    """
    trainer = trainer_of(mesh, config)
    trainer.scaling.factor = min(FACTOR, trainer.scaling.factor)
    widen_masters(trainer.optimizer)
    if trainer.outer:
        trainer.outer.start()
    if steps.start:
        assert resume(ThreadJob(mesh), folder, trainer, str) == steps.start
    evaluator = evaluator_of(trainer) if evaluates(config) else None
    totals = []
    for number in steps:
        step = trainer.step(number)
        found = evaluator.evaluate(number) if evaluator else None
        totals.append(
            (step.loss, step.grad_norm, *([found.loss, found.accuracy] if found else ()))
        )
    if evaluator and totals:
        assert frozen_evaluation(trainer)[:4] == found[:4]
    if steps.stop < config.train.steps:
        header = partial(header_of, config, trainer.feed.batches)
        saver = Saver(folder, trainer, config.checkpoint, header, str)
        saver.save(steps.stop)
        saver.wait()
    return trained_of(trainer, [])._replace(totals=totals)


def header_of(config, batches, done):
    """Return the header of a checkpoint, with the position in the texts of a mixture."""
    header = {"run_id": "run", "config": to_toml(config)}
    position = {"position": batches.position(done)} if isinstance(batches, Batches) else {}
    return header | position


def widen_masters(optimizer):
    """Multiply the master weights by the same factors as `trainer_of` does the values."""
    for item in optimizer.parameters:
        for spec, state in optimizer.states_of(item):
            if spec is MASTER and item.std:
                state *= WIDER


def evaluates(config):
    """Return True if evaluations are compared; asynchronous ones mix weight versions."""
    return config.train.eval_every and not find(config.parallel.schedule).asynchronous


def on_threads(config, *arguments):
    return run(config.sizes(), lambda mesh: train(read_only(mesh), config, *arguments))


def trained(lines):
    """Return the training of each rank of the last mix, with the totals of all mixes."""
    configs = [config_of(line) for line in lines]
    steps = configs[0].train.steps
    if len(lines) == 1:
        return on_threads(*configs, range(steps))
    with TemporaryDirectory() as folder:
        begun = on_threads(configs[0], range(SAVED), Path(folder))
        rest = on_threads(configs[1], range(SAVED, steps), Path(folder))
    assert all(each.totals == begun[0].totals for each in begun)
    return [each._replace(totals=begun[0].totals + each.totals) for each in rest]


@cache
def serial(line):
    """Return the training of a model on one rank, which is compared with torch if torch has the
    optimizer and no token is dropped."""
    config = config_of(line)
    (found,) = on_threads(config, range(config.train.steps))
    exact = config.train.dtype == "float64" and not config.train.product_dtype
    if exact and config.train.optimizer in TORCH and not config.model.dropout:
        expected = without_noise(RULES["none"](config), config)
        ours = found._replace(totals=[each[:2] for each in found.totals])
        same(without_noise(ours, config), expected)
    return found


def expected_of(line):
    """Return the exact training of a mix.

    Routing is discontinuous, so mixtures are compared with one rank of the same number types.
    """
    schedule = words_of(line).get("schedule")
    if schedule in ("pipedream", "pipedream-2bw"):
        return RULES[schedule](config_of(exact(line)))
    if "local_steps" in words_of(line):
        return of_workers(alone(line if "experts" in words_of(line) else exact(line)), line)
    if "experts" in words_of(line):
        return serial(alone(line))
    return serial(alone(exact(line)))


LOCAL = "local_steps", "sync", "outer_learning_rate", "outer_momentum", "microbatches", "steps"


def of_workers(model, line):
    """Return the training of a model by the workers of a mix, with one rank per worker."""
    words = {key: value for key, value in words_of(line).items() if key in LOCAL}
    workers = config_of(line).workers
    config = config_of(f"{model} {rendered(words)} d={workers} schedule=none")
    found, *_ = on_threads(config, range(config.train.steps))
    return found


def without_noise(trained, config):
    """Remove the rounding noise in biases of keys.

    Their exact gradient is 0. AdamW divides rounding noise by its own size plus epsilon, and Lion
    uses its sign.
    """
    weights = dict(trained.weights)
    for name in [each for each in weights if each.endswith("qkv.bias")]:
        where, block = weights.pop(name)
        if config.train.optimizer != "lion":
            weights[name] = where, np.where(abs(block) < NOISE, 0, block)
    return Trained(trained.totals, weights)


# key=value -> bounds of its relative errors: of the loss before the first update, of later losses,
# and of norms and weights.
BOUNDS = {
    "dtype=float32": (2e-6, 0.01, 0.01),
    "dtype=bfloat16": (0.005, 0.05, 0.05),
    "dtype=float16": (0.003, 0.03, 0.03),
    "reduce_dtype=float32": (0, 0.01, 0.01),
    "reduce_dtype=bfloat16": (0, 0.05, 0.05),
    "reduce_dtype=float16": (0, 0.05, 0.05),
    "keep_dtype=bfloat16": (0, 0.05, 0.05),
    "keep_dtype=int8": (0, 0.1, 0.1),
    "keep_dtype=float8": (0, 0.2, 0.2),
    "product_dtype=float8": (0.05, 0.3, 0.3),
    "compression=powersgd": (0, 0.2, 0.9),  # of low rank: a smaller norm
    "compression=top-k": (0, 0.2, 0.9),
}


def near(found, expected, bounds, initial):
    """Assert that losses, norms and weights of a rank are within `bounds` of the exact ones.

    The error of a weight is relative to the norm of all weights of the rank. If gammas have the
    initial value `initial` = 0, they are offsets from 1, and count as the sums.
    """
    first, later, others = (sum(each) + 1e-10 for each in zip(*bounds))
    ours, exact = np.array(found.totals), np.array(expected.totals)
    assert abs(ours[0, 0] - exact[0, 0]) <= first * exact[0, 0]
    for column, bound in zip(range(exact.shape[1]), (later, others, later)):  # no accuracies
        assert (abs(ours - exact) <= bound * exact)[:, column].all()
    error = norm = 0.0
    for name, (where, block) in found.weights.items():
        part = expected.weights[name][1][where]
        rows, padding = block[: len(part)].astype(float), block[len(part) :]
        assert not padding.any(), name
        whole = part + (1 - initial) if name.endswith("gamma") else part
        error, norm = error + ((rows - part) ** 2).sum(), norm + (whole**2).sum()
    assert error <= others**2 * norm


def without_drops(lines):
    """Remove the capacity if a mix shards sequences, because dropped tokens then depend on it."""
    configs = [config_of(line) for line in lines if "experts" in words_of(line)]
    sharded = any(each.routing_group() < each.model.sequence for each in configs)
    return [f"{line} capacity=0" for line in lines] if sharded else lines


def right(case):
    """Raise an error if a case that the rules allow does not train like one rank."""
    lines = without_drops(case.split(" then "))
    config = config_of(lines[-1])
    expected = without_noise(expected_of(lines[-1]), config)
    bounds = [BOUNDS[word] for word in {*case.split()} & {*BOUNDS}]
    shapes = [block.shape for _, block in expected.weights.values()]
    if config.train.optimizer == "adamw-8bit" and any(map(in_blocks, shapes)):
        bounds.append((0, 0.01, 0.01))  # the blocks of a row depend on the layout
    if config.model.experts:  # rounding reroutes some tokens
        bounds = [[2 * bound for bound in each] for each in bounds]
    if find(config.parallel.schedule).update_per_microbatch:  # updates within the first step
        bounds = [(later, later, others) for _, later, others in bounds]
    found = [without_noise(each, config) for each in trained(lines)]
    for each in found:
        if bounds:
            near(each, expected, bounds, family_of(config.model).norm.INITIAL)
        else:
            same(each, expected)
    cover(found, expected)


def is_allowed(case):
    """Return True if the rules allow all mixes; otherwise, each error line must name a problem."""
    try:
        for line in case.split(" then "):
            config_of(line)
    except ValueError as error:
        lines = str(error).splitlines()
        assert lines and all(" = " in one or ": " in one for one in lines), lines
        return False
    return True


def right_or_refused(case):
    allowed = is_allowed(case)
    event("right" if allowed else "refused")
    if allowed:
        right(case)


MODEL = (
    "optimizer=sgd learning_rate=0.5 warmup=0 decay=constant weight_decay=0 steps=2 layers=4 "
    "hidden=24 heads=24 batch=48 sequence=4 clip=0"
)
FOUND = (
    """optimizer=adafactor kind=llama heads=12 offload='["parameters"]'""",
    """x=2 y=2 split='{n="x y",replicate="x"}'""",
    """x=2 y=2 split='{n="x y",own="x"}'""",
    "optimizer=adamw-8bit every=1 then optimizer=adamw-8bit every=1",
    " then ".join(
        f"kind=llama heads=12 ffn=256 optimizer=adamw-8bit every=1 scheme=1d d=2 {ranks}"
        for ranks in ("x=4", "x=2 zero=2")
    ),
    """x=2 y=2 z=2 microbatches=2 split='{m="x y z",own="x",replicate="y"}'""",
    """x=2 y=2 d=2 zero=2 split='{m="x",n="y",replicate="x",panels="y"}'""",
    """x=2 d=2 split='{m="x",own="x"}' compression=powersgd every=1 then every=1""",
    """y=2 d=3 zero=2 split='{n="y",panels="y"}'""",
    """x=2 y=2 split='{k="x y",own="y",replicate="x"}'""",
    """x=2 y=2 d=2 zero=3 scheme=3d-broadcast""",
    """x=2 y=2 d=2 zero=2 split='{n="x",k="y",own="x y"}'""",
    """x=3 y=2 d=2 zero=3 split='{m="x",n="y",own="x",panels="y"}'""",
    """x=2 y=2 d=2 zero=2 kind=bert split='{m="x",n="y"}'""",
    """d=2 path='["0.h5", "1.h5"]' weights='[2, 1]'""",
    """d=4 local_steps=3 sync=stale bucket_mb=0 outer_momentum=0.9 steps=8""",
)


@pytest.mark.parametrize("case", strided(FOUND, 3))
def test_previously_failing_configurations_train_correctly(case):
    right(" then ".join(f"{MODEL} {line}" for line in case.split(" then ")))


LATER = """
d=2 zero=1 microbatches=2
d=2 c=2 zero=2 microbatches=2 kind=llama heads=12 kv_heads=12
p=2 d=2 zero=1 schedule=interleaved chunks=2 microbatches=2
p=2 d=2 zero=2 schedule=zb-v chunks=2 microbatches=2
p=2 d=2 zero=1 schedule=1f1b microbatches=4 tied=false
d=2 x=2 y=2 zero=1 scheme=2d microbatches=2 recompute=full
d=2 z=2 zero=1 microbatches=2 optimizer=muon
d=4 shard=2 zero=1 microbatches=2
d=2 e=2 zero=1 experts=4 balance_bias=0.01 moe_every=2 recompute=full
p=2 d=2 zero=3 schedule=gpipe microbatches=2
d=2 zero=1 microbatches=2 dtype=float16
d=2 zero=1 microbatches=2 offload='["parameters"]'
p=2 d=2 zero=1 schedule=pipedream-2bw microbatches=4
""".strip().splitlines()


@pytest.mark.parametrize("line", strided(LATER, 5))
def test_gathers_during_the_next_forward_pass_change_no_value(line):
    """Both runs evaluate after each step; synchronous ones resume from a checkpoint."""
    line = f"{MODEL} steps=3 eval_every=1 validation=0.1 bucket_mb=0.001 {line}"
    plain, later = (f"{line} prefetch={prefetch}" for prefetch in ("false", "true"))
    asynchronous = "pipedream" in line
    waits = "offload" not in line and not asynchronous
    assert gathers_later(config_of(later)) == waits and not gathers_later(config_of(plain))
    parts = 1 if asynchronous else 2
    for found, expected in zip(trained([later] * parts), trained([plain] * parts), strict=True):
        assert found.totals == expected.totals
        for name, (_, block) in found.weights.items():
            np.testing.assert_array_equal(block, expected.weights[name][1], name)


PAIRS = """
e=2 microbatches=4 experts=4 top_k=2 prefetch=true
e=2 x=2 microbatches=2 experts=4 capacity=0 recompute=full z_loss=0.01
d=2 e=2 zero=1 microbatches=3 experts=4 top_k=2 capacity=0.5 balance_bias=0.01 recompute=[0,1]
d=2 e=2 zero=3 microbatches=4 experts=4 prefetch=true bucket_mb=0.001 recompute=full
p=2 e=2 microbatches=4 experts=4 capacity=0 balance_loss=0.01 moe_every=2
p=2 d=2 e=2 zero=2 microbatches=6 experts=4 shared_experts=1 prefetch=true overlap=false
p=2 e=2 x=2 microbatches=4 experts=4 top_k=2 kind=llama heads=6 kv_heads=6 recompute=selective
c=2 e=2 microbatches=2 experts=4 balance_loss=0.01 dropout=0.25 keep_dtype=bfloat16
""".strip().splitlines()


@pytest.mark.parametrize("line", strided(PAIRS, 4))
def test_passes_that_alternate_change_no_value(line):
    """Both runs evaluate after each step, and resume from a checkpoint."""
    line = f"{MODEL} steps=3 eval_every=1 validation=0.1 schedule=dualpipe-v {line}"
    plain, pairs = (f"{line} overlap_experts={overlap}" for overlap in ("false", "true"))
    for found, expected in zip(trained([pairs] * 2), trained([plain] * 2), strict=True):
        assert found.totals == expected.totals
        for name, (_, block) in found.weights.items():
            np.testing.assert_array_equal(block, expected.weights[name][1], name)


REDUCED = (
    """dtype=bfloat16 reduce_dtype=float32 d=2 c=2 y=2 zero=3 split='{n="y",panels="y"}'""",
    """dtype=float16 d=4 shard=2 zero=3 reduce_dtype=float32 every=1 then dtype=float16 every=1""",
    """reduce_dtype=bfloat16 d=3 x=2 zero=2 split='{m="x"}'""",
)


@pytest.mark.parametrize("case", strided(REDUCED, 3))
def test_zero_2_and_3_reduce_gradients_in_another_type(case):
    right(" then ".join(f"{MODEL} {line}" for line in case.split(" then ")))


LINES = [f"{MODEL} schedule=none {line}" for line in FOUND if " then " not in line]
ON_FOUR = [line for line in LINES if ranks(line) == 4]


@pytest.mark.slow
@pytest.mark.timeout(0)  # tests.jobs limits each case
@pytest.mark.parametrize(
    "case", [Case(4, how, line) for how in ("auto", "mpi") for line in ON_FOUR], ids=str
)
def test_previously_failing_configurations_train_correctly_on_mpi_ranks(run_in_job, case):
    run_in_job("tests.pipeline.on_mpi", case)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 10)
@given(case=cases())
def test_random_configuration_trains_correctly_or_is_rejected(case):
    right_or_refused(case)


@pytest.mark.slow
def test_most_random_configurations_are_allowed():
    allowed = []

    @settings(max_examples=200, phases=[Phase.generate])
    @given(case=cases())
    def draw(case):
        allowed.append(is_allowed(case))

    draw()
    assert 0.55 < np.mean(allowed) < 0.85
