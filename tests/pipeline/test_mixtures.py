"""The selected experts and dropped tokens do not depend on the mesh or on microbatches, unless
ranks share the tokens of a sequence: then each rank has its own slots."""

from collections import defaultdict
from functools import cache
from itertools import product
from math import ceil
from time import monotonic_ns

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.tensor.layout import Layout
from hpc3d.trace.schema import OP
from tests.model.mixture_reference import with_a_slot
from tests.pipeline.mixes import config_of, trainer_of
from tests.strided import strided

RATE = 0.05
MODEL = f"experts=4 top_k=2 capacity=0.75 sequence=8 layers=2 steps=2 batch=64 balance_bias={RATE}"
BATCH, TOKENS, EXPERTS, SLOTS = 64, 8, 4, 3
MESHES = """
d=2 zero=1
e=2
e=4 zero=2
e=2 x=2 y=2 z=2
e=2 x=4 scheme=1d-sequence
e=2 x=2 y=2 scheme=2d-summa
e=2 d=2 x=2 z=2 zero=3 scheme=2.5d
p=2 e=2 y=2 schedule=zb-h1
""".strip().splitlines()
MICROBATCHES = 1, 2, 4
# Ranks that share sequences, and how many tokens of one each has.
SHARED = {
    "c=2 e=2 d=2 microbatches=2": 4,
    "c=4 e=2 context=both ulysses=2": 2,
    "d=4 e=2 x=2 scheme=1d-sequence microbatches=8": 4,
    "c=2 y=4 scheme=3d microbatches=32": 2,
}


def note(mixture, layer, rows, found):
    """Let a mixture on X's `rows` record under (step, layer): the indices of its tokens in the
    batch, their routes, which of these have slots, and its bias."""
    decide = mixture._decide

    def noting(routes, choices, form, micro):
        slots, loss = decide(routes, choices, form, micro)
        if mixture.notes:
            sequences = micro.sequences // mixture.context.parts
            numbers = (micro.first + np.arange(sequences))[:, None] * TOKENS + np.arange(TOKENS)
            numbers = mixture.context.cut(numbers).reshape(-1, 1)
            start = loss.first % len(choices)
            mine = slice(start, start + len(routes.lse))
            own = numbers[rows.slices(numbers.shape, mixture.mesh)[0], 0][mine]
            kept = slots[mine] >= 0
            found[micro.step, layer].append((own, routes, kept, mixture.bias.value.copy()))
        return slots, loss

    mixture._decide = noting


@cache
def noted(line):
    """Return {(step, layer): records of all ranks} of a training of two steps."""
    config, found = config_of(f"{line} {MODEL}"), defaultdict(list)
    rows = Layout(" ".join(config.splits["dense"].x[0]), "")

    def train(mesh):
        trainer = trainer_of(mesh, config)
        for stage in trainer.engine.stages:
            for block in stage.blocks:
                note(block.mlp, block.name, rows, found)
        for step in range(config.train.steps):
            trainer.step(step)

    run(config.sizes(), train)
    return found


@cache
def decided(line):
    """Return {(step, layer): the choices [B T, k] and which of them have slots}."""
    decisions = {}
    for key, notes in noted(line).items():
        numbers = np.concatenate([own for own, *_ in notes])
        assert sorted(numbers) == [*range(BATCH * TOKENS)]
        choices, kept = np.empty((2, BATCH * TOKENS, 2), int)
        choices[numbers] = np.concatenate([routes.experts for _, routes, *_ in notes])
        kept[numbers] = np.concatenate([kept for *_, kept, _ in notes])
        decisions[key] = choices, kept
    return decisions


def test_slots_are_assigned_in_order_and_some_tokens_are_dropped():
    for choices, kept in decided("schedule=none").values():
        shape = BATCH, TOKENS, 2
        expected = with_a_slot(choices.reshape(shape).tolist(), EXPERTS, SLOTS)
        assert kept.reshape(shape).tolist() == expected
        assert BATCH < (kept == 0).sum() < BATCH * TOKENS


@pytest.mark.parametrize(("line", "micros"), strided([*product(MESHES, MICROBATCHES)], 18))
def test_routing_does_not_depend_on_mesh_or_microbatches(line, micros):
    expected = decided("schedule=none")
    schedule = "" if "schedule" in line else "schedule=none "
    found = decided(f"{schedule}{line} microbatches={micros}")
    assert found.keys() == expected.keys()
    for key, decision in expected.items():
        np.testing.assert_array_equal(found[key], decision, err_msg=str(key))


@pytest.mark.parametrize("line", strided(SHARED, 4))
def test_ranks_that_share_a_sequence_have_slots_for_their_own_tokens(line):
    tokens, context = SHARED[line], config_of(f"{line} {MODEL}").context()
    parts = [context.positions(part) for part in range(context.parts)]
    own, slots = np.reshape(parts, (-1, tokens)), ceil(SLOTS * tokens / TOKENS)
    found = decided(f"schedule=none {line}")
    for choices, kept in found.values():
        choices, kept = (
            each.reshape(BATCH, TOKENS, 2)[:, own].reshape(-1, tokens, 2)
            for each in (choices, kept)
        )
        assert kept.tolist() == with_a_slot(choices.tolist(), EXPERTS, slots)
    first = 0, "layers.0"
    np.testing.assert_array_equal(found[first][0], decided("schedule=none")[first][0])


def test_balance_bias_moves_towards_underloaded_experts():
    """Equation 3 of arXiv:2408.15664: the largest p + b are chosen, the weights are p, and
    b_i += u sign(mean - c_i) after a step."""
    notes, layer = noted("schedule=none"), "layers.1"
    ((_, routes, _, bias),) = notes[1, layer]
    ((_, first, _, zeros),) = notes[0, layer]
    counts = np.bincount(first.experts.ravel(), minlength=EXPERTS)
    assert not zeros.any()
    np.testing.assert_array_equal(bias, RATE * np.sign(counts.mean() - counts))
    largest = np.argsort(-(routes.probs + bias), axis=1, kind="stable")[:, :2]
    np.testing.assert_array_equal(routes.experts, largest)
    assert (largest != np.argsort(-routes.probs, axis=1, kind="stable")[:, :2]).any()
    chosen = np.take_along_axis(routes.probs, routes.experts, 1)
    np.testing.assert_allclose(routes.weights, chosen / chosen.sum(1, keepdims=True), rtol=1e-14)


@pytest.mark.parametrize("shared", [0, 1])
def test_shared_experts_overlap_with_the_dispatch(shared):
    """In forward, two products are between the post and the wait of the first exchange; in
    backward, all four. The router's backward passes are always there."""
    line = f"e=2 schedule=none microbatches=1 experts=4 layers=1 shared_experts={shared} steps=1"
    config = config_of(line)

    def rank(mesh):
        recorder = MemoryRecorder(mesh.rank, monotonic_ns)
        trainer_of(mesh.traced(recorder), config).step(0)
        return recorder.rows()

    for events in run(config.sizes(), rank):
        products = events[events["op"] == OP.index("gemm")]["t_start"]
        calls = events[events["op"] == OP.index("all_to_all")]
        between = []
        for posted in np.unique(calls["posted"]):
            waited = calls["t_start"][calls["posted"] == posted].max()
            between.append(((products > posted) & (products < waited)).sum())
        assert between == [2 * shared, 0, 2 + 4 * shared, 0]
