"""The search for plans, compared with simulations: bounds and pruned layouts."""

from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.predict.machine.machine import Link, Machine, Rates
from hpc3d.predict.machine.machine_file import load as load_machine
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.bounds import kind, volumes
from hpc3d.predict.planning.candidates import seconds_of
from hpc3d.predict.planning.ranking import Ranking, shown_layout
from hpc3d.predict.planning.search import Search
from hpc3d.predict.simulation import summary
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.tensor.split import SCHEMES, Split

ROOT = Path(__file__).parents[3]
CLUSTER = Machine(
    name="nodes of 4",
    source="made up",
    ranks_per_node=4,
    cores=0,
    memory_gb=16,
    memory_bandwidth=1e12,
    launch_s=2e-6,
    gemm=dict.fromkeys(("float32", "bfloat16"), Rates(15e12, (1e8, 1e10), (2e12, 10e12))),
    links=(Link(4, 2e-6, 100e9), Link(0, 10e-6, 10e9, node_bandwidth=10e9)),
)
GB, VOCABULARY = 1e9, 51200
SMALL = "model.layers=4 model.hidden=256 model.heads=8 model.sequence=128 train.batch=32"


def config_of(line):
    """Return the unresolved Config of a line; keys without a section are [mesh] or [parallel]."""
    options = []
    for word in line.split():
        key, value = word.split("=")
        section = "mesh." if key in "pdcexyz" else "parallel."
        options += ["--" + ("" if "." in key else section) + key, value]
    return load(None, options)


def settled(line, ranks=8):
    config = config_of(line)
    sizes = {axis: getattr(config.mesh, axis) or 1 for axis in "xyz"}
    return resolve(replace(config, mesh=replace(config.mesh, **sizes)), ranks)


def step(config, machine=CLUSTER, vocabulary=256):
    """Return seconds and peak bytes by simulation."""
    runs = simulate(config, vocabulary, machine)
    start, end = min(run.step[2] for run in runs), max(run.step[3] for run in runs)
    return (end - start) / 1e9, max(run.peak["all"] for run in runs)


def search(line=SMALL, ranks=8, machine=CLUSTER, memory=16 * GB, most=400, top=10):
    found = Search(config_of(line), ranks, 256, machine, memory)
    return found, found.run(top, most)


def fastest(searched, timed):
    """Return the fastest option of a mesh that fits by its estimate, or None."""
    return next(filter(searched.candidates.fits, timed.offers), None)


@pytest.fixture(scope="module")
def small():
    return search()


def test_llama_is_planned_on_more_ranks_than_kv_heads():
    """The model that has as many key heads as queries measures the launch times."""
    line = f"{SMALL} model.kind=llama model.kv_heads=2 model.ffn=640"
    searched, found = search(line, most=40, top=3)
    assert found.timed and over(searched) == {1, 2, 4, 8}


def test_tensor_ranks_divide_the_kv_heads():
    line = f"{SMALL} model.hidden=384 model.heads=24 model.kind=llama model.ffn=640"
    assert over(Search(config_of(f"{line} model.kv_heads=6"), 8, 256, CLUSTER, 16 * GB)) == {1, 2}


def test_every_estimate_is_counted():
    searched = Search(config_of(SMALL), 8, 256, CLUSTER, 16 * GB)
    candidates, config = searched.candidates, next(iter(searched.allowed_candidates())).config
    found = [*candidates.options(config, config.mesh.p, (0,), candidates.ways(config)[0])]
    assert candidates.count == len(found) > 0


@pytest.mark.parametrize(("micros", "memory", "tried"), [(8, 16, 0), (8, 0.13, 2), (2, 16, 2)])
def test_lean_schedules_are_tried_only_if_they_may_be_best(micros, memory, tried):
    """ZB-V needs 139 MB with 8 microbatches, V-Half 118 MB and V-Min 97 MB."""
    line = f"{SMALL} model.layers=16"
    candidates = Search(config_of(line), 8, 256, CLUSTER, memory * GB).candidates
    config, way = settled(f"{line} p=4 d=2 schedule=1f1b"), layouts.MEMORY_OPTIONS[0]
    found = candidates.options(config, micros, (0,), way, splits=True)
    names = [each.config.parallel.schedule for each in found]
    assert names[:4] == ["dualpipe-v", "zb-h1", "zb-h2", "zb-v"]
    assert names[4:] == ["v-half", "v-min"][:tried]


def over(searched):
    """Return the numbers of ranks over which the candidates of a search split heads."""
    configs = [candidate.config for candidate in searched.allowed_candidates()]
    sizes = [(config.sizes(), config.splits["dense"].y[1]) for config in configs]
    return {prod(size[axis] for axis in axes) for size, axes in sizes}


@pytest.mark.slow
def test_bounds_are_below_the_estimates(small):
    searched, found = small
    for each in found.timed:
        assert searched.bounds.least(each.candidate) < each.best.seconds


def test_bound_uses_the_interleaved_bubble():
    """With m = p and four chunks per stage, the bubble is 3/16, not 3/4."""
    line = "model.layers=16 model.hidden=1024 model.heads=8 model.sequence=512 train.batch=4 p=4"
    config = settled(f"{line} microbatches=4 schedule=interleaved chunks=4", 4)
    searched = Search(config, 4, 256, CLUSTER, 16 * GB)
    searched.calibrate([searched.bounds.candidate(config)])
    least, seconds = searched.bounds.least(searched.bounds.candidate(config)), step(config)[0]
    assert 0.65 * seconds < least < seconds


# The search


def every_layout(searched, ways):
    """Return all layouts of a search, with some memory-saving techniques."""
    for candidate in searched.allowed_candidates():
        mesh = candidate.config.mesh
        zeros = (0, 1) if mesh.d > 1 else (0,)
        for micros, way in product(layouts.microbatches(candidate.config, 8), ways):
            for (name, chunks), zero in product(layouts.schedules(mesh.p, micros, 4), zeros):
                changes = {"microbatches": micros, "schedule": name, "chunks": chunks}
                changes |= {"zero": zero, **way._asdict()}
                parallel = replace(candidate.config.parallel, **changes)
                yield replace(candidate.config, parallel=parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "ways"),
    [
        (16 * GB, layouts.MEMORY_OPTIONS[:1]),
        pytest.param(0.025 * GB, layouts.MEMORY_OPTIONS, marks=pytest.mark.slow),
    ],
)
def test_no_pruned_layout_has_a_faster_estimate(memory, ways, small):
    searched, found = small if memory == 16 * GB else search(memory=memory)
    every = map(searched.estimator.estimate, every_layout(searched, ways))
    best = min(each.seconds for each in every if each.peak <= memory)
    assert found.timed[0].best.seconds <= 1.02 * best


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_pruned_layout_is_faster_in_simulation():
    searched, found = search()
    best = Ranking(searched, found, CLUSTER, most=1e9).best(10)[0]
    every = map(step, every_layout(searched, layouts.MEMORY_OPTIONS[:1]))
    assert best.seconds <= 1.05 * min(seconds for seconds, _ in every)


@pytest.mark.slow
def test_step_time_grows_as_memory_shrinks():
    steps = []
    for memory in (1, 0.05, 0.03, 0.02):
        searched, found = search(memory=memory * GB)
        fitting = (fastest(searched, each) for each in found.timed if each.fits)
        best = min(filter(None, fitting), key=lambda each: each.seconds)
        assert step(best.config)[1] <= 1.1 * memory * GB
        steps.append(best.seconds)
    assert steps == sorted(steps) and steps[0] < steps[-1]


def test_zero_stage_increases_until_the_model_fits():
    line = "model.layers=8 model.hidden=512 model.heads=8 model.sequence=64 train.batch=8"
    searched = Search(config_of(line), 8, 256, CLUSTER, 16 * GB)
    replicas = next(
        candidate for candidate in searched.allowed_candidates() if candidate.config.mesh.d == 8
    )
    zeros = []
    parameters = 4 * 8 * 12 * 512**2
    # Values and gradients take 2 of these, the optimiser's states 2 more.
    for memory in (8, 3.8, 2.6, 1.6):
        searched.candidates.memory = memory * parameters
        found = searched.timed(replicas)
        assert found.fits
        zeros.append(found.best.config.parallel.zero)
    assert zeros == sorted(zeros) and zeros[-1] == 3


def test_zero_3_is_preferred_to_recomputed_products_on_fast_links():
    line = "model.layers=8 model.hidden=256 model.heads=8 model.sequence=1023 train.batch=8"
    near = replace(CLUSTER, links=(Link(0, 1e-6, 1e12),))
    searched = Search(config_of(line), 8, 256, near, 16 * GB)
    replicas = next(
        candidate for candidate in searched.allowed_candidates() if candidate.config.mesh.d == 8
    )
    cheap = layouts.MemoryOption(True, ("core_attn", "layernorm", "mlp_act"))
    (two,), (three,) = (
        [*searched.candidates.options(replicas.config, 1, (zero,), cheap)] for zero in (2, 3)
    )
    searched.candidates.memory = (two.peak + three.peak) / 2
    found = fastest(searched, searched.timed(replicas)).config.parallel
    assert (found.zero, found.recompute) == (3, cheap.recompute)


def test_recomputation_increases_by_modules_until_the_model_fits():
    line = "model.layers=8 model.hidden=256 model.heads=8 model.sequence=512 train.batch=1"
    searched = Search(config_of(line), 1, 256, CLUSTER, 16 * GB)
    (candidate,) = searched.allowed_candidates()
    ways = searched.candidates.ways(config := candidate.config)
    peaks = [next(searched.candidates.options(config, 1, (0,), way)).peak for way in ways]
    assert peaks == sorted({*peaks}, reverse=True) and len(peaks) == 5
    for way, peak in zip(ways, peaks):
        searched.candidates.memory = peak
        found = fastest(searched, searched.timed(candidate)).config.parallel
        assert found.recompute == way.recompute


def test_gathered_blocks_are_released_if_they_do_not_fit():
    line = "model.layers=8 model.hidden=256 model.heads=8 model.sequence=128 train.batch=4"
    searched = Search(config_of(line), 8, 256, CLUSTER, 16 * GB)
    cube = next(
        candidate
        for candidate in searched.allowed_candidates()
        if (mesh := candidate.config.mesh).x == mesh.y == mesh.z == 2
    )
    ways = searched.candidates.ways(config := cube.config)[:2]
    peaks = [next(searched.candidates.options(config, 1, (0,), way)).peak for way in ways]
    assert [way.keep_gathered for way in ways] == [True, False] and peaks[0] > peaks[1]
    for way, peak in zip(ways, peaks):
        searched.candidates.memory = peak
        found = fastest(searched, searched.timed(cube)).config.parallel
        assert found.keep_gathered == way.keep_gathered


def test_search_reports_that_nothing_fits():
    _, found = search(memory=1e5, most=100)
    assert not any(each.fits for each in found.timed)


@pytest.mark.slow
def test_fewer_microbatches_with_recomputation_are_considered():
    """One microbatch with recomputation can be faster than several without, and also fit."""
    line = "model.hidden=4096 model.heads=64 model.layers=8 model.sequence=2048 train.batch=32"
    line += " train.dtype=float16"
    machine = load_machine(ROOT / "inputs" / "machines" / "h100.toml")
    found = Search(config_of(line), 16, VOCABULARY, machine, 10.5 * GB).run(3, 100)
    first, _ = step(found.timed[0].best.config, machine, VOCABULARY)
    other = settled(f"{line} x=8 y=2 scheme=2d recompute=selective", ranks=16)
    seconds, peak = step(other, machine, VOCABULARY)
    assert peak < 10.5 * GB
    assert first < 1.02 * seconds


def test_fewer_gathers_of_weights_outweigh_recomputation():
    """Each microbatch gathers the weights, which takes longer than the recomputation."""
    line = "model.layers=8 model.hidden=512 model.heads=8 model.sequence=256 train.batch=8"
    slow = replace(CLUSTER, links=(Link(0, 1e-6, 2e9),))
    candidates = Search(config_of(line), 2, 256, slow, 16 * GB).candidates
    config = settled(f"{line} x=2 scheme=3d", ranks=2)
    ways, counts = candidates.ways(config), layouts.microbatches(config, 2)
    every = {
        (count, way): next(candidates.options(config, count, (0,), way))
        for count, way in product(counts, ways)
    }
    candidates.memory = every[1, ways[-1]].peak
    fitting = {key: each.seconds for key, each in every.items() if candidates.fits(each)}
    assert counts == (1, 2, 4) and (4, ways[3]) in fitting
    best = min(filter(candidates.fits, candidates.promising(config)), key=seconds_of)
    assert best.seconds == min(fitting.values()) == fitting[1, ways[-1]]


# Mixtures of experts

BIG = (
    "model.kind=llama model.kv_heads=8 model.layers=1 model.hidden=1024 model.heads=8 "
    "model.ffn=4096 model.sequence=128 train.batch=8 model.experts=4"
)


@pytest.mark.slow
def test_experts_too_large_for_a_rank_use_expert_and_tensor_parallelism():
    """An expert has 3 x 1024 x 4096 weights with 16 bytes each: 0.2 GB."""
    searched, found = search(BIG, 16, memory=0.15 * GB)
    fitting = [each.best for each in found.timed if each.fits]
    best = min(fitting, key=lambda each: each.seconds).config
    assert step(best)[1] <= 1.1 * searched.memory
    assert best.mesh.e > 1 and best.mesh.x * best.mesh.y * best.mesh.z > 1
    assert any(each.config.mesh.e > 1 and kind(each.config) == "3-D" for each in fitting)


def test_experts_are_replicated_if_memory_allows():
    """No tokens are sent along e then; gradient reductions are as long as with fewer experts."""
    _, found = search(f"{SMALL} model.experts=2 model.top_k=2", 2)
    fastest = min((each.best for each in found.timed if each.fits), key=lambda each: each.seconds)
    exchanged = [each.best for each in found.timed if each.best.config.mesh.e > 1]
    assert fastest.config.mesh.e == 1 and exchanged
    assert all(each.waits["e"] > 0 for each in exchanged)


def test_estimated_mixture_traffic_matches_the_simulation():
    """Compares the bounds' bytes along e and of gradient reductions with a simulated step."""
    line = "model.experts=8 model.top_k=2 model.layers=4 model.capacity=1 train.dtype=float32"
    config = settled(f"{SMALL} {line} d=2 e=4 p=1".replace("model.layers=4", "", 1))
    words = volumes(config)
    runs = simulate(config, 256, CLUSTER)
    moved = {
        axis: sum(each["bytes"] for each in ops.values())
        for axis, ops in summary.moved(runs[0]).items()
    }
    assert words["e"] * 4 == moved["e"]
    assert words["d"] * 4 == pytest.approx(moved["d"], rel=0.01)  # biases are left out
    assert words["d e"] * 4 == pytest.approx(moved["d e"], rel=0.15)  # and tables


# Schemes


def test_split_of_the_input_is_searched():
    words = ["--parallel.split", '{ m = "x", n = "y", replicate = "y" }']
    config = load(None, [*words, "--model.layers", "2", "--train.batch", "8"])
    searched = Search(config, 4, 256, CLUSTER, 16 * GB)
    found = [candidate.config for candidate in searched.allowed_candidates()]
    (mine,) = [config for config in found if kind(config) == "parallel.split"]
    assert (mine.mesh.x, mine.mesh.y, mine.tensor_split) == (2, 2, config.tensor_split)
    assert searched.unsearched == ""
    assert 'split={m="x", n="y", replicate="y"}' in shown_layout(mine)


def test_scheme_without_a_valid_mesh_gets_a_line():
    """3 ranks divide neither 8 heads nor 32 x 128 tokens."""
    line = "scheme 2d was not searched: no mesh of 3 ranks is valid for it"
    assert Search(config_of(f"{SMALL} scheme=2d"), 3, 256, CLUSTER, 16 * GB).unsearched == line
    for ranks, scheme in ((4, "2d"), (3, "3d")):
        config = config_of(f"{SMALL} scheme={scheme}")
        assert Search(config, ranks, 256, CLUSTER, 16 * GB).unsearched == ""


@pytest.mark.slow
def test_added_scheme_is_planned_and_named(monkeypatch):
    monkeypatch.setitem(SCHEMES, "added", Split(m="x", n="y", replicate="y"))
    searched, found = search(ranks=4, most=100, top=3)
    ranking = Ranking(searched, found, CLUSTER, most=10)
    ranking.widen()
    row = ranking.named()["added"]
    assert row.config.parallel.split == {"m": "x", "n": "y", "replicate": "y"}
    assert any(each.candidate.kind == "added" for each in found.timed)


def test_local_updates_keep_the_number_of_workers():
    config = config_of(f"{SMALL} d=4 local_steps=16")
    search = Search(config, 8, VOCABULARY, CLUSTER, 16 * GB)
    found = {candidate.config.mesh.d for candidate in search.allowed_candidates()}
    assert found == {4}
    three = replace(config, mesh=replace(config.mesh, d=3))
    with pytest.raises(ValueError, match=r"no layout on 8 ranks .* mesh\.d = 3 workers"):
        Search(three, 8, VOCABULARY, CLUSTER, 16 * GB).run(1, 1)
