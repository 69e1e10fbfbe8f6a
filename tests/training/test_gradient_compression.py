"""Gradient compression: sums, residuals, messages and state."""

from math import inf, prod

import numpy as np
import pytest

from hpc3d.checkpoints.inspect import problems
from hpc3d.checkpoints.sharded import (
    Checkpoint,
    Snapshot,
    complete,
    restore,
    restore_own,
    write_shard,
)
from hpc3d.comm.threads import run
from hpc3d.config.load import to_toml
from hpc3d.model.parameters import Parameters
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.predict.simulation.count import every_rank
from hpc3d.tensor.layout import Layout
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.schema import EVENTS, record_type
from hpc3d.training.gradient_compression import CompressionSpec, GradientCompression
from hpc3d.training.guard import ReplicaCheck
from tests.checkpoints.killed_runs import LAYOUTS, run_until
from tests.checkpoints.killed_runs import losses as losses_of
from tests.pipeline.mixes import alone, config_of, cover, same, serial, train, trainer_of
from tests.predict.simulation.test_count import counted
from tests.strided import strided

SHAPES = {"layers.0.wide": (8, 20), "layers.0.high": (30, 7), "head.w": (12, 12), "b": (9,)}
STACK = {"layers.0.experts": (6, 3, 15)}
RANK, SHARE, MEMBERS, STEPS = 2, 0.1, 3, 4


def gradient(name, shape, member, step):
    """Return a gradient with a decaying spectrum, different in every step."""
    draw = np.random.default_rng([*name.encode(), member, step])
    left, right = draw.normal(size=(*shape[:-1], 8)), draw.normal(size=(8, shape[-1]))
    return left * 0.5 ** np.arange(8) @ right if len(shape) > 1 else draw.normal(size=shape)


def summed(kind, shapes, zero=0, gradient=gradient, size=1e6):
    """Return, for each rank, the sums of all steps, the last residuals and the first factors."""

    def rank(mesh):
        parameters = Parameters(mesh, "float64", zero)
        for name, shape in shapes.items():
            layout = Layout(*[""] * len(shape))
            parameters.add(name, shape, layout, partial=("d",))
        parameters.allocate(1)
        spec = CompressionSpec(kind, RANK, SHARE, seed=1)
        compression = GradientCompression(parameters, spec)
        first = {}
        if kind == "powersgd":
            first = {item.name: q.copy() for item, q in compression.factors.items()}
        buckets, found = Buckets(parameters, size, compression), []
        for step in range(STEPS):
            for item in parameters:
                item.grad[...] = gradient(item.name, item.shape, mesh.rank, step)
            buckets.wait()
            found.append({item.name: item.grad.copy() for item in parameters})
            buckets.begin()
        left = {item.name: block.copy() for item, block in compression.residuals.items()}
        return found, left, first

    return run({"d": MEMBERS}, rank)


def low_rank(stacks, q):
    """PowerSGD of the members' matrices by projections; return (sum, residuals, Q)."""
    q, _ = np.linalg.qr(sum(stacks) @ q)
    projected = [q @ (q.T @ m) for m in stacks]
    return sum(projected), [m - p for m, p in zip(stacks, projected)], sum(stacks).T @ q


def largest(blocks, _):
    """Top-k of the members' blocks by sorting; return (sum, residuals, None)."""
    kept = []
    for block in blocks:
        count = round(SHARE * block.size)
        order = sorted(range(block.size), key=lambda place: (-abs(block.flat[place]), place))
        kept.append(np.where(np.isin(np.arange(block.size), order[:count]), block.flat, 0))
    kept = [each.reshape(block.shape) for each, block in zip(kept, blocks)]
    return sum(kept), [block - each for block, each in zip(blocks, kept)], None


def expected(rule, name, shape, q, turned):
    """Return the sums of all steps and the last residuals of one matrix, by plain NumPy."""
    left, sums = [np.zeros(shape)] * MEMBERS, []
    for step in range(STEPS):
        given = [gradient(name, shape, i, step) + left[i] for i in range(MEMBERS)]
        given = [m.T for m in given] if turned else given
        total, left, q = rule(given, q)
        if turned:
            total, left = total.T, [each.T for each in left]
        sums.append(total)
    return sums, left


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("kind", ["powersgd", "top-k"])
def test_compressed_sums_and_residuals_match_a_reference(kind, zero):
    found = summed(kind, SHAPES, zero)
    for name, shape in SHAPES.items():
        if len(shape) < 2:
            continue
        q, turned = None, kind == "powersgd" and shape[0] > shape[1]
        if kind == "powersgd":
            q = found[0][2][name]
        rule = low_rank if kind == "powersgd" else largest
        sums, left = expected(rule, name, shape, q, turned)
        for member, (steps, residuals, _) in enumerate(found):
            np.testing.assert_allclose([step[name] for step in steps], sums, atol=1e-10)
            np.testing.assert_allclose(residuals[name], left[member], atol=1e-10)


@pytest.mark.parametrize("kind", ["powersgd", "top-k"])
def test_compression_preserves_the_total_gradient_and_skips_vectors(kind):
    """Sums plus residuals equal the gradients, for buckets of any size."""
    for size in (0, 1e6):
        found = summed(kind, SHAPES | STACK, size=size)
        for name, shape in (SHAPES | STACK).items():
            per_step = [
                sum(gradient(name, shape, i, step) for i in range(MEMBERS))
                for step in range(STEPS)
            ]
            sent = [step[name] for step in found[0][0]]
            if len(shape) < 2:
                np.testing.assert_allclose(sent, per_step, atol=1e-12)
                continue
            assert np.abs(sent[-1] - per_step[-1]).max() > 0.1  # something is left out
            kept = sum(residuals[name] for _, residuals, _ in found)
            np.testing.assert_allclose(sum(sent) + kept, sum(per_step), atol=1e-10)


def test_experts_are_compressed_separately():
    """Each expert is reduced as if it were the only one, with its own part of Q."""
    ((name, shape),) = STACK.items()
    found = summed("powersgd", STACK)
    for expert in range(shape[1]):
        left, q = [np.zeros((6, 15))] * MEMBERS, found[0][2][name][:, expert]
        for step in range(STEPS):
            given = [gradient(name, shape, i, step)[:, expert] + left[i] for i in range(MEMBERS)]
            total, left, q = low_rank(given, q)
            np.testing.assert_allclose(found[1][0][step][name][:, expert], total, atol=1e-10)


def test_flops_of_low_rank_compression():
    """M Q, M' P, and P Q' for the residual and for the sum: 8 mnr per matrix and step."""

    def rank(mesh):
        recorder = Recorder(None, {"rank": mesh.rank}, 1 << 10, every_s=inf)
        mesh = mesh.traced(recorder)
        parameters = Parameters(mesh, "float64", 0)
        for name, shape in (SHAPES | STACK).items():
            parameters.add(name, shape, Layout(*[""] * len(shape)), partial=("d",))
        parameters.allocate(1)
        compression = GradientCompression(parameters, CompressionSpec("powersgd", RANK, 0, 1))
        Buckets(parameters, 1e6, compression).wait()
        return np.frombuffer(recorder.table, record_type(EVENTS), recorder.count)["flops"].sum()

    elements = sum(prod(shape) for shape in (SHAPES | STACK).values() if len(shape) > 1)
    assert run({"d": MEMBERS}, rank) == [8 * elements * RANK] * MEMBERS


def test_low_rank_gradient_is_exact_after_a_zero_gradient():
    """Experts without tokens have a zero gradient; the directions of the previous step remain."""

    def of_rank_2(name, shape, member, step):
        draw = np.random.default_rng([*name.encode(), member])
        right = np.random.default_rng([*name.encode()]).normal(size=(2, shape[-1]))
        return (step != 1) * (draw.normal(size=(*shape[:-1], 2)) @ right)

    found = summed("powersgd", {"head.w": (20, 30)}, gradient=of_rank_2)
    whole = sum(of_rank_2("head.w", (20, 30), i, 0) for i in range(MEMBERS))
    for steps, _, _ in found:
        for step, sums in enumerate(steps):
            np.testing.assert_allclose(sums["head.w"], (step != 1) * whole, atol=1e-10)
    assert np.abs(sum(residuals["head.w"] for _, residuals, _ in found)).max() < 1e-10


def test_matrices_without_savings_are_not_compressed():
    spec = CompressionSpec("powersgd", 4, 0.01, 1)
    assert [spec.saves((8, columns), 2, 4) for columns in (7, 8, 9)] == [False, False, True]
    assert not spec.saves((4, 1000), 2, 4)
    spec = CompressionSpec("top-k", 4, 0.1, 1)  # 0.1 (d - 1) 8 < 2 (1 - 1 / d) 4 up to d = 9
    assert [spec.saves((100, 100), members, 4) for members in (2, 9, 10)] == [True, True, False]


# With all columns, or all elements, of everything.
WHOLE = """
d=2 schedule=none microbatches=2 compression=powersgd compression_rank=400
p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=1 compression=top-k compression_share=1
d=2 x=2 y=2 schedule=none microbatches=2 zero=1 compression=powersgd compression_rank=400
d=4 schedule=none microbatches=2 overlap=false compression=top-k compression_share=1
d=2 x=2 y=2 schedule=none zero=1 scheme=2d-summa compression=powersgd compression_rank=400
d=2 x=2 y=2 schedule=none scheme=3d-broadcast compression=powersgd compression_rank=400
d=2 x=2 z=2 schedule=none kind=bert scheme=2.5d compression=top-k compression_share=1
p=2 d=2 c=2 schedule=zb-h1 microbatches=4 sequence=4 compression=powersgd compression_rank=400
p=2 d=2 schedule=zb-v chunks=2 kind=llama ffn=48 compression=powersgd compression_rank=400
d=2 e=2 x=2 experts=4 top_k=2 zero=1 compression=powersgd compression_rank=400 bucket_mb=0.01
c=2 e=2 y=2 sequence=4 experts=4 capacity=0 moe_every=2 compression=top-k compression_share=1
""".strip().splitlines()


@pytest.mark.parametrize("line", strided(WHOLE, 12))
def test_full_rank_compression_matches_serial_training(line, monkeypatch):
    monkeypatch.setattr(CompressionSpec, "saves", lambda *_: True)
    config, wanted = config_of(line), serial(alone(line))
    found = run(config.sizes(), lambda mesh: train(mesh, config))
    for trained in found:
        same(trained, wanted)
    cover(found, wanted)


LOW = "d=2 schedule=none microbatches=2 compression=powersgd compression_rank=2"
FEW = "d=3 schedule=none microbatches=2 zero=1 compression=top-k compression_share=0.1"


@pytest.mark.parametrize("line", strided([f"{LOW} x=2 zero=1", FEW], 2))
def test_compressed_replicas_stay_equal_and_the_loss_falls(line):
    config = config_of(f"{line} steps=8 learning_rate=0.01")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        replicas, losses = ReplicaCheck(trainer, 1), []
        for number in range(config.train.steps):
            losses.append(trainer.step(number).loss)
            replicas.after(number)
        return losses

    for losses in run(config.sizes(), rank):
        assert losses[-1] < 0.95 * losses[0]


def sizes_of(config):
    """Return the shapes of the reduced blocks of a rank, compressed ones and others."""

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        takes = trainer.buckets.compresses
        summed = [item for item in trainer.parameters if item.partial]
        return (
            [item.grad.shape for item in summed if takes(item)],
            [item.grad.shape for item in summed if not takes(item)],
        )

    return run(config.sizes(), rank)[0]


def test_received_bytes_of_compression_match_the_formulas():
    """Matrices: 2 (1 - 1/d) r (m + n) e and (d - 1) k (e + 4); vectors: 2 (1 - 1/d) m e."""
    config = config_of(LOW)
    taken, others = sizes_of(config)
    assert len(taken) == 18 and min(map(len, taken)) == 2
    wanted = 8 * (sum(2 * (m + n) for m, n in taken) + sum(map(prod, others)))
    for found in counted(config):
        axis = {key: moved for key, moved in found.moved().items() if key[0] == "d"}
        assert sum(nbytes for _, nbytes in axis.values()) == wanted

    config = config_of(FEW.replace("zero=1", "zero=0"))
    taken, others = sizes_of(config)
    wanted = 2 * 12 * sum(round(0.1 * m * n) for m, n in taken)
    wanted += 4 / 3 * 8 * sum(map(prod, others))
    for found in counted(config):
        axis = {key: moved for key, moved in found.moved().items() if key[0] == "d"}
        assert sum(nbytes for _, nbytes in axis.values()) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("line", [f"{LOW} x=2", FEW, f"{LOW} e=2 experts=4 zero=1"])
def test_predicted_residual_memory_matches_a_run(line):
    config = config_of(line)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.step(0)
        own = sum(state.nbytes for state in trainer.parameters.own_states.values())
        return mesh.pool.peak["optimizer"], own

    predicted = [each.peak["optimizer"] for each in every_rank(config, config.model.vocabulary)]
    found = run(config.sizes(), rank)
    assert [peak for peak, _ in found] == predicted
    assert all(own > 0 for _, own in found)


@pytest.mark.slow
@pytest.mark.parametrize("line", strided([f"{LOW} x=2 zero=1", FEW], 2, 1))
def test_compressed_run_resumes_bit_for_bit(line, tmp_path):
    config, folder = config_of(line), tmp_path / "step-00000003.tmp"
    folder.mkdir()
    header = {"run_id": "run", "config": to_toml(config), "step": 3, "updates": 3}

    def begun(mesh):
        trainer = trainer_of(mesh, config)
        for number in range(3):
            trainer.step(number)
        write_shard(folder, mesh.rank, Snapshot(trainer.parameters, trainer.optimizer))
        if mesh.rank == 0:
            assert not complete(folder, mesh.ranks, header, keep=1)
        return [trainer.step(number)[1:4] for number in (3, 4)]

    def resumed(mesh, own=True):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)
        if own:
            restore_own(opened, trainer.parameters)
        trainer.optimizer.steps = 3
        return [trainer.step(number)[1:4] for number in (3, 4)]

    wanted = run(config.sizes(), begun)
    opened = Checkpoint(folder.with_suffix(""))
    assert problems(opened.folder) == []
    assert run(config.sizes(), resumed) == wanted
    assert run(config.sizes(), lambda mesh: resumed(mesh, own=False)) != wanted


def test_residuals_are_reset_and_reported_on_other_data_axes(tmp_path, monkeypatch):
    run = "batch=8 layers=1 schedule=none decay=constant steps=1000000 compression=powersgd"
    monkeypatch.setitem(LAYOUTS, "d=2", f"{run} d=2 compression_rank=2")
    monkeypatch.setitem(LAYOUTS, "alone", f"{run} compression_rank=2")
    line = "resume: the error feedback of parallel.compression is reset to 0"
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    for folder, stops in ((whole, [4]), (begun, [2, 4])):
        folder.mkdir()
        for steps in stops:
            run_until(folder, "d=2", steps)
    assert losses_of(begun) == losses_of(whole)
    assert line not in (begun / "said").read_text()
    run_until(begun, "alone", 5)
    assert line in (begun / "said").read_text()
    monkeypatch.setitem(LAYOUTS, "d=2", f"{run} d=2 compression=none")
    run_until(whole, "d=2", 5)
    line = "resume: the error feedback of parallel.compression is discarded"
    assert line in (whole / "said").read_text()
