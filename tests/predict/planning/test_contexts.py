"""Plans with context parallelism: allowed layouts, traffic, and models that require it."""

from dataclasses import replace

import pytest

from hpc3d.predict.machine.machine import Link
from hpc3d.predict.planning import contexts, layouts
from hpc3d.predict.planning.search import Search
from hpc3d.predict.simulation.count import predict
from tests.predict.planning.test_search import CLUSTER, GB, config_of, fastest, settled, step

# Two heads and one sequence: tensor axes take 4 ranks at most, and replicas none.
LONG = """
model.kind=llama model.layers=2 model.hidden=64 model.heads=2 model.sequence=8192 train.batch=1
""".strip()


@pytest.fixture(scope="module")
def whole():
    """Return the peaks of layouts of 4 ranks with unsplit sequences and all memory techniques."""
    searched = Search(config_of(LONG), 4, 256, CLUSTER, 1.0)
    every = (
        offer.peak
        for candidate in searched.allowed_candidates()
        if candidate.config.mesh.c == 1
        for micros in layouts.microbatches(candidate.config, 4)
        for way in searched.candidates.ways(candidate.config)
        for zero in layouts.zeros(candidate.config, 4)
        for offer in searched.candidates.options(candidate.config, micros, zero, way)
    )
    return min(every)


def test_context_parallelism_is_used_if_nothing_else_fits(whole):
    memory = 0.8 * whole
    searched = Search(config_of(LONG), 4, 256, CLUSTER, memory)
    found = searched.run(3, 400)
    best = min(
        filter(None, (fastest(searched, each) for each in found.timed if each.fits)),
        key=lambda each: each.seconds,
    )
    assert best.config.mesh.c > 1
    assert step(best.config)[1] <= memory


def test_context_parallelism_is_not_used_if_data_parallelism_suffices():
    """With equal work per rank, data parallelism moves less, if the batch divides and fits."""
    many = layouts.bare(config_of("model.layers=4 model.sequence=128 train.batch=32"))
    found = {config.mesh.c for (config,) in filter(None, layouts.every_mesh(many, 8, 16 * GB))}
    assert found == {1}


@pytest.mark.parametrize(
    ("line", "memory"),
    [
        ("train.batch=4", 16 * GB),  # does not divide over 8 replicas
        ("train.batch=8 p=2", 16 * GB),  # leaves two stages one microbatch each
        ("train.batch=8", 4e6),  # 2 layers keep 16 and 1 vectors of 64 elements of 8192 tokens
    ],
)
def test_context_parallelism_is_considered_only_if_useful(line, memory):
    config = on_one_rank_a_stage(f"{LONG} {line}")
    assert contexts.may_cut(config, 8, memory)
    assert not contexts.may_cut(config, 3, memory)  # nor do they divide


def on_one_rank_a_stage(line):
    config = config_of(line)
    return replace(config, mesh=replace(config.mesh, x=1, y=1, z=1))


def test_context_parallelism_is_not_considered_on_one_stage_that_fits():
    config = on_one_rank_a_stage(f"{LONG} train.batch=8")
    assert not contexts.may_cut(config, 8, 16 * GB)


WORDS = """
c=4 x=2
c=4 p=2 context=all-to-all microbatches=2
c=4 d=2 context=both ulysses=2
c=4 y=2 scheme=3d context=both ulysses=2 microbatches=2 train.dtype=float16
c=8 model.window=3 model.global_every=2
c=8 context=both ulysses=2 model.window=2
""".strip().splitlines()


@pytest.mark.parametrize("line", WORDS)
def test_context_traffic_estimate_matches_the_counted_bytes(line):
    """Compares all layers and microbatches, without gradient reductions."""
    base = "model.layers=2 model.kind=llama model.heads=8 model.kv_heads=4 model.hidden=64"
    config = settled(f"{base} model.sequence=32 train.batch=4 {line}")
    coords = dict.fromkeys(config.sizes(), 0)
    moved = predict(config, 256, coords).moved().items()
    counted = sum(nbytes for (axis, op, _), (_, nbytes) in moved if axis == "c" and op != "send")
    itemsize = 2 if config.train.dtype == "float16" else 4
    words = contexts.ring_words(config) + contexts.exchange_words(config)
    assert words * itemsize == pytest.approx(counted, rel=1e-12)


@pytest.mark.slow
def test_bounds_of_context_layouts_are_below_their_estimates():
    searched = Search(config_of(f"{LONG} model.layers=4 train.batch=2"), 8, 256, CLUSTER, 0.2 * GB)
    found = searched.run(10, 400)
    cut = [each for each in found.timed if each.candidate.config.mesh.c > 1]
    assert len(cut) > 3
    for each in cut:
        assert searched.bounds.least(each.candidate) < each.best.seconds


SLOW = replace(CLUSTER, links=(Link(4, 2e-6, 10e9), Link(0, 10e-6, 1e9, node_bandwidth=1e9)))
# Machine, c, KV heads, tokens, and the fastest kind of context parallelism.
COSTS = [
    (CLUSTER, 4, 1, 16384, ("ring", 1)),
    (CLUSTER, 8, 8, 2048, ("both", 4)),
    (CLUSTER, 8, 1, 16384, ("both", 2)),
    (SLOW, 8, 8, 2048, ("all-to-all", 1)),
    (SLOW, 8, 8, 16384, ("all-to-all", 1)),
    (SLOW, 8, 1, 16384, ("both", 4)),
]


@pytest.mark.parametrize(("machine", "c", "kv_heads", "tokens", "expected"), COSTS)
def test_kind_of_context_parallelism_is_chosen_by_cost(machine, c, kv_heads, tokens, expected):
    """A ring between nodes is slow, also if the first two ranks of the ring share a node."""
    line = f"{LONG} model.heads=8 model.kv_heads={kv_heads} model.sequence={tokens} c={c}"
    searched, shown, seconds = Search(config_of(line), c, 256, machine, 16 * GB), {}, {}
    for context, ulysses in contexts.contexts(c):
        config = settled(f"{line} context={context} ulysses={ulysses}", c)
        kind = context, ulysses
        shown[kind] = searched.bounds.shown_context(searched.bounds.candidate(config))
        seconds[kind] = searched.estimator.estimate(config).seconds
    assert min(shown, key=shown.get) == expected
    assert seconds[expected] <= 1.06 * min(seconds.values())


def test_bound_ignores_ring_messages_hidden_by_attention():
    """Tests messages as long as the work of a rank, and four fifths of them."""
    machine = replace(CLUSTER, links=(Link(0, 1e-6, 5e9),))
    config = settled(f"{LONG} train.batch=2 c=8")
    searched = Search(config, 8, 256, machine, 16 * GB)
    candidate = searched.bounds.candidate(config)
    searched.calibrate([candidate])
    seconds = searched.estimator.estimate(config).seconds
    assert searched.bounds.least(candidate) < seconds
    assert searched.bounds.least(candidate._replace(hidden=0.0)) > seconds
