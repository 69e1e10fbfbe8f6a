"""Variants of layouts: the proposals, compared with simulations."""

from dataclasses import replace

import pytest

from hpc3d.config.pipeline_rules import wrong_pipeline
from hpc3d.predict.machine.machine import Link
from hpc3d.predict.planning.adaptation import (
    bucket_sizes,
    gains,
    group_sizes,
    layer_pipeline,
    least_uneven,
    uneven,
    with_groups,
    with_other_buckets,
    with_overlap,
    with_prefetch,
)
from hpc3d.predict.planning.bounds import Candidate
from hpc3d.predict.planning.candidates import Candidates
from hpc3d.predict.planning.estimate import Estimator
from hpc3d.predict.planning.layer_counts import LayerCounts
from hpc3d.predict.planning.layouts import bare
from hpc3d.predict.planning.ranked_layouts import ranked
from hpc3d.predict.planning.search import TimedCandidate
from tests.predict.planning.test_layer_counts import every
from tests.predict.planning.test_search import CLUSTER, config_of, settled, step
from tests.strided import strided

TABLE = 32768  # tokens, whose products take as long as three layers
MODEL = "model.layers=6 model.hidden=256 model.heads=8 model.sequence=128 train.batch=32 "
LARGE = MODEL + f"model.vocabulary={TABLE} "
SMALL = MODEL + "model.vocabulary=256 "
SLOW = replace(CLUSTER, links=(Link(0, 1e-5, 1e9),))
LINE = "p=4 schedule=1f1b microbatches=8"
GB = 1e9


def offered(config, memory=16 * GB, machine=CLUSTER):
    """Return the estimate of a resolved layout, and its uneven proposals."""
    estimator = Estimator(config.model.vocabulary, machine)
    candidates = Candidates(estimator, config.grid().size, memory)
    even = estimator.estimate(config)
    timed = TimedCandidate(Candidate(config, {}, 0.0), [even], candidates.fits(even), 0.0)
    found = [offer.estimate for offer in uneven(candidates, [timed])]
    return even, [each for each in found if each.config.parallel.layers_per_stage]


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        "p=2 schedule=interleaved chunks=2 microbatches=4",
        "p=2 d=2 schedule=zb-v microbatches=4 zero=1",
        pytest.param("p=4 schedule=gpipe microbatches=8", marks=pytest.mark.slow),
        pytest.param("p=2 x=2 schedule=zb-h1 microbatches=4", marks=pytest.mark.slow),
    ],
)
def test_large_vocabulary_favors_uneven_layers(line):
    config = settled(LARGE + line, 2 if "chunks" in line else 4)
    even, [best] = offered(config)
    (usual, _), (seconds, peak) = (step(each.config, vocabulary=TABLE) for each in (even, best))
    assert sum(best.config.parallel.layers_per_stage) == 6
    assert seconds < 0.97 * usual
    assert best.seconds == pytest.approx(seconds, rel=0.03 if config.mesh.d == 1 else 0.07)
    assert best.peak == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("line", ["p=2 schedule=1f1b microbatches=8", "p=2 schedule=gpipe"])
def test_even_layers_are_kept_if_the_ends_are_free(line):
    assert offered(settled(SMALL + line, 2))[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("line", [LINE, "p=4 schedule=zb-h1 microbatches=4"])
def test_proposed_layer_counts_are_the_fastest_in_simulation(line):
    config = settled(LARGE + line, 4)
    _, [best] = offered(config)
    seconds, _ = step(best.config, vocabulary=TABLE)
    others = [
        step(
            replace(config, parallel=replace(config.parallel, layers_per_stage=counts)),
            CLUSTER,
            TABLE,
        )[0]
        for counts in every(6, 4)
    ]
    assert seconds <= 1.01 * min(others)


def test_uneven_layers_fit_if_even_layers_do_not():
    """The stage with the head fits only if it has fewer layers than the others."""
    config = settled(LARGE + LINE, 4)
    _, peak = step(config, vocabulary=TABLE)
    memory = 0.95 * peak
    even, [best] = offered(config, memory)
    _, held = step(best.config, vocabulary=TABLE)
    assert even.peak > memory >= held
    assert best.peak == pytest.approx(held, rel=0.03)


def test_memory_limit_changes_the_best_layer_counts():
    """With a short table, all stages are equally fast, but the first one has most in flight."""
    config = settled(SMALL + "p=2 schedule=1f1b microbatches=8 model.layers=8", 2)
    estimator = Estimator(256, CLUSTER)
    free = layer_pipeline(estimator, config, 16 * GB)
    one, other = (free.held(0, (count,)) for count in (4, 3))
    search = LayerCounts(free._replace(memory=(one + other) / 2), 10**9)
    assert LayerCounts(free, 10**9).best([4, 4]) is None
    assert search.best([4, 4]) == (3, 5)


def test_least_uneven_is_a_lower_bound():
    estimator = Estimator(TABLE, CLUSTER)
    estimate = estimator.estimate(settled(LARGE + LINE, 4))
    _, [best] = offered(settled(LARGE + LINE, 4))
    assert least_uneven(estimator, estimate) < best.seconds < estimate.seconds


# Buckets


def test_bucket_sizes_are_multiples_of_a_layer():
    config = settled(SMALL + "d=4", 4)
    sizes = bucket_sizes(Estimator(256, CLUSTER), config)
    layer = 4 * (12 * 256**2 + 13 * 256) / 1e6
    assert sizes == sorted(sizes) and config.parallel.bucket_mb not in sizes
    for times, size in zip((1, 2, 4), sizes):
        assert times * layer <= size <= 1.1 * times * layer


@pytest.mark.parametrize("machine", [CLUSTER, SLOW])
def test_estimates_rank_bucket_sizes(machine):
    config = settled(MODEL + "model.vocabulary=4096 d=8")
    candidates = Candidates(Estimator(4096, machine), 8, 16 * GB)
    others = with_other_buckets(candidates, config)
    assert [each.seconds for each in others] == sorted(each.seconds for each in others)
    assert len({each.seconds for each in others}) > 2


PAIRS = replace(CLUSTER, ranks_per_node=2, links=(Link(2, 2e-6, 100e9), Link(0, 1e-5, 1e9)))
TINY = MODEL + "model.vocabulary=4096 "


@pytest.mark.parametrize(
    ("line", "ranks", "expected"),
    [("d=8", 2, [2, 4]), ("d=8", 4, [4]), ("d=4 x=2 scheme=1d", 4, [2]), ("d=8", 16, [])],
)
def test_groups_divide_the_replicas_and_span_a_host(line, ranks, expected):
    assert group_sizes(settled(TINY + line), ranks) == expected


@pytest.mark.parametrize("zero", strided([1, 2, 3], 3, 2))
def test_estimates_of_hybrid_sharding_are_close_to_simulations(zero):
    config = settled(f"{TINY} d=8 zero={zero} microbatches=2")
    found = with_groups(Candidates(Estimator(4096, PAIRS), 8, 16 * GB), config)
    assert {each.config.parallel.shard for each in found} == {2, 4}
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    for each in found:
        seconds, peak = step(each.config, PAIRS, 4096)
        assert each.seconds == pytest.approx(seconds, rel=0.1)
        assert each.peak == pytest.approx(peak, rel=0.1)
    if zero == 3:
        assert found[0].seconds < 0.9 * step(config, PAIRS, 4096)[0]


def test_layout_without_zero_is_sharded_in_groups_with_zero_1():
    config = settled(TINY + "d=8")
    found = with_groups(Candidates(Estimator(4096, PAIRS), 8, 16 * GB), config)
    assert {each.config.parallel.zero for each in found} == {1}


def test_groups_use_a_higher_zero_stage_if_memory_requires_it():
    config = settled(f"{TINY} d=8 zero=1 microbatches=2")
    estimator = Estimator(4096, PAIRS)
    stages = {zero: replace(config.parallel, shard=2, zero=zero) for zero in (1, 2)}
    peak = {
        zero: estimator.estimate(replace(config, parallel=parallel)).peak
        for zero, parallel in stages.items()
    }
    tight = with_groups(Candidates(estimator, 8, (peak[1] + peak[2]) / 2), config)
    fastest = next(filter(in_pairs, tight))
    assert fastest.config.parallel.zero == 2


def test_groups_recompute_no_more_than_memory_requires():
    config = settled(f"{TINY} d=8 zero=3 recompute=full")
    found = with_groups(Candidates(Estimator(4096, PAIRS), 8, 16 * GB), config)
    assert {each.config.parallel.recompute for each in found} == {"none"}


def test_groups_would_change_the_number_of_workers():
    config = settled(TINY + "d=4 c=2 local_steps=4")
    assert with_groups(Candidates(Estimator(4096, PAIRS), 8, 16 * GB), config) == []


def in_pairs(estimate):
    return estimate.config.parallel.shard == 2


@pytest.mark.parametrize(
    ("line", "stages"),
    [
        ("d=8 zero=3", {3}),
        ("d=8 zero=1", {2, 3}),
        ("x=2 y=2 z=2 scheme=3d", {0}),
        ("d=2 x=2 y=2 scheme=2d", {0, 1, 2, 3}),
        ("x=8 scheme=1d", set()),
        ("d=8 zero=3 prefetch=true", set()),
    ],
)
def test_prefetch_is_tried_for_layouts_that_communicate_weights(line, stages):
    config = settled(TINY + line)
    found = with_prefetch(Candidates(Estimator(4096, SLOW), 8, 16 * GB), config)
    assert {each.config.parallel.zero for each in found} == stages
    assert all(each.config.parallel.prefetch for each in found)


@pytest.mark.parametrize("line", ["d=8 zero=3", "x=2 y=2 z=2 scheme=3d"])
def test_estimates_of_prefetch_are_close_to_simulations(line):
    config = settled(TINY + line)
    [*_, best] = with_prefetch(Candidates(Estimator(4096, PAIRS), 8, 16 * GB), config)
    seconds, peak = step(best.config, PAIRS, 4096)
    assert best.seconds == pytest.approx(seconds, rel=0.1)
    assert best.peak == pytest.approx(peak, rel=0.1)
    assert seconds < 0.97 * step(config, PAIRS, 4096)[0]


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("e=8", [2, 4]),
        ("p=2 e=4 schedule=zb-v microbatches=4", [4, 8]),
        ("p=4 e=2 schedule=1f1b microbatches=4", []),  # a layer per model chunk
        ("e=8 offload=['parameters']", []),
        ("d=8", []),
    ],
)
def test_overlap_of_experts_is_tried_with_two_microbatches_per_stage(line, counts):
    config = settled(f"{TINY} model.experts=8 {line}")
    found = with_overlap(Candidates(Estimator(4096, SLOW), 8, 16 * GB), config)
    assert sorted(each.config.parallel.microbatches for each in found) == counts
    for each in found:
        assert each.config.parallel.overlap_experts
        assert not [*wrong_pipeline(each.config)]


@pytest.mark.parametrize("line", ["e=8", "d=2 e=4 zero=1"])
def test_estimates_of_overlapping_experts_are_close_to_simulations(line):
    config = settled(f"{TINY} model.experts=8 {line}")
    estimator = Estimator(4096, PAIRS)
    best, *_ = with_overlap(Candidates(estimator, 8, 16 * GB), config)
    seconds, peak = step(best.config, PAIRS, 4096)
    assert best.seconds == pytest.approx(seconds, rel=0.1)
    assert best.peak == pytest.approx(peak, rel=0.1)
    parallel = replace(best.config.parallel, overlap_experts=False)
    without = replace(best.config, parallel=parallel)
    assert seconds < 0.97 * step(without, PAIRS, 4096)[0]
    assert best.seconds < 0.97 * estimator.estimate(without).seconds


def test_small_gain_does_not_justify_a_key():
    assert gains(0.98, 1.0) and not gains(0.995, 1.0)


# Plans


@pytest.fixture(scope="module")
def plan_with_large_table():
    config = config_of(LARGE)
    _, ranking = ranked(config, 4, SLOW, 16 * GB, 10)
    return config, ranking.best(10)


@pytest.mark.slow
def test_plan_uses_uneven_layers_if_they_are_faster(plan_with_large_table):
    config, [best, *_] = plan_with_large_table
    assert best.simulated and best.config.parallel.layers_per_stage
    seconds, peak = step(best.config, SLOW, TABLE)
    assert (best.seconds, best.peak) == (pytest.approx(seconds, rel=1e-9), peak)
    even = replace(best.config.parallel, layers_per_stage=None)
    assert seconds < 0.9 * step(replace(best.config, parallel=even), SLOW, TABLE)[0]
    chosen = replace(bare(best.config).parallel, bucket_mb=None)
    assert replace(bare(best.config), parallel=chosen) == bare(config)


@pytest.mark.slow
def test_plan_uses_the_bucket_size_that_is_fastest_in_simulation():
    config = config_of(MODEL + "model.vocabulary=4096")
    _, ranking = ranked(config, 8, CLUSTER, 0.3 * GB, 10)
    best = ranking.best(10)[0]
    parallel = best.config.parallel
    others = [
        step(replace(best.config, parallel=replace(parallel, bucket_mb=size)), CLUSTER, 4096)[0]
        for size in (0.8, 1.6, 3.2, 6.4, 13.0, 25.0)
    ]
    assert parallel.bucket_mb != 25.0
    assert best.seconds <= 1.01 * min(others)
    assert best.seconds < 0.9 * others[-1]


@pytest.mark.slow
def test_plan_simulates_hybrid_sharding_of_the_best_layouts():
    """There are four slowly connected pairs, and no memory for unsharded optimizer states."""
    config = config_of(
        "model.layers=1 model.hidden=256 model.heads=1 model.sequence=128 model.vocabulary=4096 "
        "train.batch=512"
    )
    _, ranking = ranked(config, 8, PAIRS, 0.05 * GB, 10)
    best = ranking.best(10)[0]
    fitting = [row.seconds for row in ranking.known.values() if ranking.fits(row)]
    assert any(each.parallel.shard for each in ranking.known)
    assert best.seconds <= 1.01 * min(fitting)


@pytest.mark.slow
def test_plan_prefetches_weights_if_that_is_faster():
    """With one head, one layer and little memory, weights are sharded over the slow links."""
    config = config_of(
        "model.layers=1 model.hidden=256 model.heads=1 model.sequence=128 model.vocabulary=512 "
        "train.batch=64"
    )
    _, ranking = ranked(config, 8, SLOW, 0.012 * GB, 10)
    best = ranking.best(10)[0]
    parallel = best.config.parallel
    assert parallel.prefetch
    without = replace(best.config, parallel=replace(parallel, prefetch=False))
    assert best.seconds < 0.99 * step(without, SLOW, 512)[0]
