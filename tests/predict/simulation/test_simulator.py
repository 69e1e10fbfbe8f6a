"""Simulated steps: replayed passes equal executed ones, and times equal those of the machine."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hpc3d.cuda.gpu import WORKSPACE
from hpc3d.model.stage import Stage
from hpc3d.pipeline.program import Program, program_of
from hpc3d.predict.machine.machine import Link
from hpc3d.predict.simulation import simulator
from hpc3d.predict.simulation.count import predict
from hpc3d.predict.simulation.simulated_clock import clock_of
from hpc3d.predict.simulation.simulator import simulate, simulated_trainer, step_length
from hpc3d.predict.simulation.stage_turns import StageTurns
from hpc3d.predict.simulation.summary import summary, waits_of
from hpc3d.trace.schema import CATEGORY, OP, PHASE
from tests.pipeline.mixes import MIXES, config_of
from tests.predict.fixed import BYTES, FLOPS, LAUNCH, MACHINE
from tests.predict.simulation.test_count import MIXTURES, PAIRS
from tests.strided import strided

TIMES = {"t_start", "t_global", "dur", "posted", "name"}
COPY = CATEGORY.index("copy")
ASYNCHRONOUS = """
p=4 schedule=pipedream microbatches=6 tied=false clip=0 steps=4
p=4 schedule=pipedream-2bw microbatches=8 tied=false steps=4
p=2 d=2 x=2 schedule=pipedream-2bw microbatches=4 steps=3
""".strip().splitlines()
REPLAYED = """
p=1 schedule=none microbatches=4 hidden=32 heads=4 backend=cupy dtype=bfloat16
x=2 y=2 z=2 schedule=none microbatches=3 batch=24 sequence=8
p=2 d=2 schedule=zb-v chunks=2 microbatches=4 dropout=0.1 backend=cupy dtype=float32
c=4 x=2 schedule=none microbatches=3 sequence=8 context=both ulysses=2
c=2 schedule=none microbatches=4 zero=3 sequence=8 hidden=32 heads=4 backend=cupy dtype=bfloat16
p=2 c=4 schedule=1f1b microbatches=3 sequence=32 window=3 global_every=2
p=2 d=2 schedule=1f1b microbatches=4 zero=1 dropout=0.1 backend=cupy dtype=float32 cuda_graph=true
p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=1 bucket_mb=0.001 prefetch=true
d=2 schedule=none microbatches=3 zero=2 prefetch=true backend=cupy dtype=float32 cuda_graph=true
""".strip().splitlines()
BLOCKS = """
p=2 d=2 x=2 schedule=1f1b microbatches=3 layers=12 zero=1 bucket_mb=0.01 recompute=[2,8]
schedule=none microbatches=4 layers=7 sequence=256 dtype=bfloat16 kind=llama ffn=48
d=2 c=2 y=2 z=2 schedule=none microbatches=2 layers=6 sequence=8 zero=1 recompute=selective
p=2 d=2 c=4 schedule=interleaved chunks=2 microbatches=4 layers=24 sequence=8 prefetch=true
z=2 x=2 d=2 schedule=none microbatches=2 layers=6 keep_gathered=false recompute=full prefetch=true
x=2 y=2 scheme=2d-summa schedule=none microbatches=2 layers=6
d=2 x=2 schedule=none microbatches=2 layers=7 zero=1 bucket_mb=0.001 prefetch=true
c=2 schedule=none microbatches=2 layers=7 sequence=16 window=3 global_every=3
schedule=none layers=7 sequence=99 kind=gemma3_text window=99 global_every=3 rope_window_theta=20
""".strip().splitlines()
PIPELINES = ASYNCHRONOUS + [line for line in MIXES if "p=" in line and "p=1" not in line]


def simulated(line):
    config = config_of(line)
    return config, simulate(config, config.model.vocabulary, MACHINE)


@pytest.mark.parametrize(
    "line",
    [*strided(PIPELINES, 28), *strided(REPLAYED, 5), *strided(MIXTURES, 8, 1), *PAIRS],
)
def test_replayed_passes_equal_executed_ones(line):
    """Compares all values of all rows except times, and the peaks of every kind of memory.

    The FLOPs are those of the last position of the ring, which has the most work with a window.
    """
    config, runs = simulated(line)
    context = config.context()
    last = {"c": (context.rings - 1) * context.heads}
    for stage, run in enumerate(runs):
        coords = dict.fromkeys(config.sizes(), 0) | {"p": stage}
        whole, busiest = (
            predict(config, config.model.vocabulary, each) for each in (coords, coords | last)
        )
        rows = run.rows[run.rows["category"] != COPY]
        here, there = (each.events["op"] == OP.index("attention") for each in (whole, busiest))
        whole.events["flops"][here] = busiest.events["flops"][there]
        for name in {*rows.dtype.names} - TIMES:
            np.testing.assert_array_equal(rows[name], whole.events[name], err_msg=name)
        assert Counter(run.peak) == Counter(whole.peak)


@pytest.mark.parametrize("line", PAIRS)
def test_alternating_passes_have_the_same_events(line):
    """Each event belongs to its own layer, microbatch and phase; all-to-alls also overlap."""
    fields = ["op", "phase", "microbatch", "stage", "chunk", "layer", "bytes", "count", "flops"]
    found = []
    for overlap in ("true", "false"):
        _, runs = simulated(line.replace("overlap_experts=true", f"overlap_experts={overlap}"))
        rows = [run.rows[run.rows["category"] != COPY] for run in runs]
        found.append([Counter(each[fields].tolist()) for each in rows])
    assert found[0] == found[1]


@pytest.mark.parametrize("line", ["e=8", "e=4 x=2 scheme=1d-sequence", "p=2 e=4"])
def test_alternating_passes_hide_all_to_alls(line):
    """In a pair, the experts of one pass compute while the tokens of the other one are sent."""
    machine = replace(MACHINE, links=(Link(0, 1e-5, 1e9),))
    size = "hidden=256 heads=4 sequence=64 batch=64 microbatches=8 experts=8 layers=8"
    line = f"{line} schedule=dualpipe-v {size} backend=cupy dtype=float32 overlap_experts="
    runs = [simulate(config_of(line + overlap), 29, machine) for overlap in ("true", "false")]
    waits = [waits_of(each[0])["e"] for each in runs]
    assert waits[0] < 0.6 * waits[1]
    assert step_length(runs[0]) < 0.9 * step_length(runs[1])


@pytest.mark.parametrize(
    "line",
    [
        "microbatches=3 dropout=0.1 cuda_graph=true offload=['\"optimizer\"']",
        "microbatches=6 recompute=full offload=['\"activations\"']",
        "microbatches=6 offload=['\"activations\"']",
    ],
)
def test_memory_with_offloading_equals_that_of_the_program(line):
    """Input arrays of a graph are allocated once, and copies to the host keep a single array."""
    config, (run,) = simulated(f"{line} schedule=none backend=cupy dtype=float32")
    assert Counter(run.peak) == Counter(predict(config, 29, dict.fromkeys(config.sizes(), 0)).peak)


@pytest.mark.parametrize("line", strided(BLOCKS, len(BLOCKS)))
def test_replayed_blocks_equal_executed_ones(line, monkeypatch):
    """Compares all values of all rows, and the memory; the number of rows is the same."""
    dtype = "" if "dtype" in line else "dtype=float32"
    config = config_of(f"{line} backend=cupy {dtype}")
    machine = replace(MACHINE, gemm={**MACHINE.gemm, "bfloat16": MACHINE.gemm["float32"]})
    found = simulate(config, config.model.vocabulary, machine)
    replayed = []
    monkeypatch.setattr(simulator, "replayed_blocks", lambda all, *_: replayed.append(all) or all)
    executed = simulate(config, config.model.vocabulary, machine)
    assert replayed
    for run, other in zip(found, executed, strict=True):
        np.testing.assert_array_equal(run.rows, other.rows)
        assert run._replace(events=None) == other._replace(events=None)


CONTENDED = """
d=2 schedule=none microbatches=2 layers=12
d=2 schedule=none microbatches=1 layers=12 zero=1
d=2 schedule=none microbatches=2 layers=12 bucket_mb=15
p=2 d=2 schedule=interleaved chunks=2 microbatches=4 layers=16
d=2 x=2 schedule=none microbatches=2 layers=12 scheme=1d
d=4 shard=2 schedule=none microbatches=2 layers=12 zero=1
d=2 schedule=none microbatches=3 layers=6 batch=12 zero=3 prefetch=true
d=2 schedule=none microbatches=2 layers=12 zero=1 prefetch=true
""".strip().splitlines()


@pytest.mark.parametrize("line", CONTENDED)
def test_contention_changes_times_only(line, monkeypatch):
    """The replay of passes and blocks hardly changes the step time."""
    size = "hidden=256 heads=4 sequence=64" + " bucket_mb=1" * ("bucket" not in line)
    config = config_of(f"{line} {size} backend=cupy dtype=float32")
    machine = replace(MACHINE, contention=1.5)
    quick, slow = (simulate(config, 29, each) for each in (MACHINE, machine))
    fields = [name for name in quick[0].rows.dtype.names if name not in {*TIMES, "wait"}]
    for run, other in zip(quick, slow, strict=True):
        for name in fields:
            np.testing.assert_array_equal(run.rows[name], other.rows[name], err_msg=name)
        assert run.peak == other.peak and run.busy < other.busy
    monkeypatch.setattr(simulator, "replay_passes", lambda *_: {})
    executed = step_length(simulate(config, 29, machine))
    assert step_length(slow) == pytest.approx(executed, rel=1e-5)
    assert step_length(quick) < executed


@pytest.mark.parametrize("line", CONTENDED)
@pytest.mark.parametrize("host_s", [1e-6, 1e-3])
def test_step_with_launches_hardly_depends_on_replays(line, host_s, monkeypatch):
    """The GPU is the bottleneck in the first case, and the host in the second."""
    size = "hidden=256 heads=4 sequence=64" + " bucket_mb=1" * ("bucket" not in line)
    config = config_of(f"{line} {size} backend=cupy dtype=float32")
    machine = replace(MACHINE, launch_s=0.0, host_s=host_s)
    replayed = step_length(simulate(config, 29, machine))
    quick = step_length(simulate(config, 29, replace(machine, host_s=0.0)))
    monkeypatch.setattr(simulator, "replay_passes", lambda *_: {})
    executed = step_length(simulate(config, 29, machine))
    assert replayed == pytest.approx(executed, rel=1e-6)
    assert quick < executed and (host_s < 1e-5) == (executed < 1.1 * quick)


def test_launched_step_takes_the_launches_of_its_layers():
    """A layer launches 26 kernels and two of fused attention; in a graph, it launches none.

    The host needs 10 ms per launch, which is longer than all kernels of a layer.
    """
    line = GPU.replace("microbatches=2", "microbatches=1").replace("float32", "bfloat16")
    machine = replace(MACHINE, launch_s=0.0, host_s=0.01)
    for graph, launches in (("false", 28), ("true", 0)):
        steps = [
            step_length(simulate(config, 29, machine))
            for config in (
                config_of(f"{line} sequence=128 layers={layers} cuda_graph={graph}")
                for layers in (8, 9)
            )
        ]
        assert round((steps[1] - steps[0]) / 1e7) == launches


STEADY = """
p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=6 zero=1 backend=cupy dtype=float32
p=2 d=2 schedule=zb-h1 microbatches=4 zero=3 optimizer=muon prefetch=true
d=2 e=2 schedule=none microbatches=3 zero=2 experts=4 top_k=2 balance_bias=0.01 overlap=false
p=2 d=2 schedule=1f1b microbatches=4 zero=1 bucket_mb=0.001 prefetch=true
c=2 schedule=none microbatches=4 sequence=8 hidden=32 heads=4 backend=cupy dtype=bfloat16
""".strip().splitlines()


@pytest.mark.parametrize("line", strided(STEADY, 4))
def test_step_does_not_depend_on_the_passes_of_the_step_before(line, monkeypatch):
    """A step after an update equals the second of two complete steps, but for when it begins."""
    config, found = simulated(line)
    monkeypatch.setattr(Program, "with_few", lambda self, stage, micros: self.stages[stage])
    whole = simulate(config, config.model.vocabulary, MACHINE)
    begins = [min(run.step[2] for run in runs) for runs in (found, whole)]
    assert begins[0] < begins[1]
    for pair in zip(found, whole, strict=True):
        lines, ends = [], []
        for run, begin in zip(pair, begins, strict=True):
            for name in ("t_start", "t_global", "posted"):
                run.rows[name] -= begin
            lines.append([run.names[number] for number in run.rows["name"]])
            ends.append(run.step[3] - begin)
            run.rows["name"] = 0
        assert lines[0] == lines[1] and ends[0] == ends[1]
        np.testing.assert_array_equal(*(run.rows for run in pair))
        ours, theirs = (run._replace(events=None, step=(), names=[]) for run in pair)
        assert ours == theirs


def test_product_and_call_times_are_those_of_the_machine():
    _, (run,) = simulated("x=4 scheme=1d hidden=32 heads=4 batch=4")
    gemm = run.rows[(run.rows["op"] == OP.index("gemm"))]
    np.testing.assert_allclose(gemm["dur"], np.maximum(1e3, gemm["flops"] / FLOPS * 1e9), atol=1)
    calls = run.rows[run.rows["op"] == OP.index("all_reduce")]
    large = calls[calls["bytes"] == calls["bytes"].max()]
    seconds = MACHINE.call("all_reduce", int(large["bytes"][0]), (0, 1, 2, 3))
    assert large["dur"][0] == pytest.approx(seconds * 1e9, abs=1)


def test_expert_products_and_exchanges_take_the_machine_time():
    """16 experts on 4 ranks have S C e rows each: C = ceil(3/2 1.25) for 2 sequences of 3."""
    _, (run,) = simulated("e=4 experts=16 top_k=8 hidden=240 heads=12 batch=8 layers=1")
    gemm = run.rows[run.rows["op"] == OP.index("gemm")]
    rows = 2 * 2 * 4
    up = np.isclose(gemm["flops"], 2 * rows * 240 * 960 * 16 / 4)
    assert up.sum() == 2 * 3  # up and down, forward, and backward by X and W
    moved = 4 * (rows * 240 + 240 * 960 + rows * 960) * 8  # which takes longer than the FLOP
    np.testing.assert_allclose(gemm["dur"][up], moved / BYTES * 1e9, atol=1)
    calls = run.rows[run.rows["op"] == OP.index("all_to_all")]
    calls = calls[calls["category"] != COPY]
    assert calls["bytes"].tolist() == [3 / 4 * rows * 4 * 240 * 8] * 4
    seconds = MACHINE.call("all_to_all", int(calls["bytes"][0]), (0, 1, 2, 3))
    assert calls["dur"][0] == pytest.approx(seconds * 1e9, abs=1)


GPU = "p=1 schedule=none microbatches=2 hidden=32 heads=4 backend=cupy dtype=float32"


def test_pass_that_has_been_recorded_is_executed_only_beside_gradient_reductions(monkeypatch):
    """The last microbatch is executed only on the first stage, which sends no gradient."""
    executed, whole = [], Stage.forward

    def forward(self, x, micro, starting):
        executed.append(micro.first)
        return whole(self, x, micro, starting)

    monkeypatch.setattr(Stage, "forward", forward)
    pipeline = "p=2 schedule=1f1b microbatches=4 batch=4"
    simulated(GPU.replace("p=1 schedule=none microbatches=2", pipeline))
    assert sorted(executed) == [0, 0, 3]


def test_captured_passes_take_no_launches():
    """The graph itself, the zero gradient and everything after the reductions are launched."""
    free, graph = replace(MACHINE, launch_s=0.0), config_of(f"{GPU} cuda_graph=true")
    cases = (graph, MACHINE), (config_of(GPU), MACHINE), (config_of(GPU), free)
    runs = [simulate(*case[:1], 29, *case[1:])[0] for case in cases]
    captured, launched, instant = (run.rows["dur"] for run in runs)
    update = runs[0].rows["phase"] == PHASE.index("optimizer")
    np.testing.assert_array_equal(captured[~update], instant[~update])
    np.testing.assert_array_equal(captured[update], launched[update])
    assert (launched[~update] > instant[~update]).any() and update.any()
    saved = step_length(runs[:1]) - step_length(runs[2:])
    saved -= (launched[update] - instant[update]).sum()
    assert saved == pytest.approx(2e9 * LAUNCH, abs=2)


def test_only_captured_calls_take_no_dispatch():
    """Calls over all ranks are on hosts, in any step."""
    line = "x=4 scheme=1d hidden=32 heads=4 batch=4 backend=cupy dtype=float32"
    slow, dispatch = replace(MACHINE, dispatch_s=1e-4), 1e5  # ns
    for graph in ("false", "true"):
        config = config_of(f"{line} cuda_graph={graph}")
        (run,), (quick,) = (simulate(config, 29, machine) for machine in (slow, MACHINE))
        calls = run.rows[run.rows["category"] == CATEGORY.index("comm")]
        over_all = np.array([run.axes[group] == "world" for group in calls["group"]])
        count = over_all.sum() if graph == "true" else len(calls)
        assert len(calls) > over_all.sum() > 0
        assert step_length([run]) - step_length([quick]) == pytest.approx(count * dispatch, abs=9)


def test_step_on_a_transport_that_cannot_be_captured_is_launched():
    line = f"d=2 zero=1 {GPU[4:]} batch=4 transport=host-staged cuda_graph="
    steps = [step_length(simulated(line + graph)[1]) for graph in ("true", "false")]
    assert steps[0] == steps[1] > step_length(simulated(f"d=2 {line[4:]}true transport=nccl")[1])


def test_gpu_attention_saves_no_scores():
    """In 16 bits; half of 2 products of 2 T^2 D per head in forward, with inputs and outputs."""
    machine = replace(MACHINE, gemm={**MACHINE.gemm, "bfloat16": MACHINE.gemm["float32"]})
    line = f"{GPU} dtype=bfloat16 sequence=1024 batch=4 layers=1"
    (run,) = simulate(config_of(line), 29, machine)
    forward, backward = run.rows[run.rows["op"] == OP.index("attention")][:2]
    heads, rows = 2 * 4, 2 * 1024
    flop = 2 * heads * 1024**2 * 8
    nbytes = 2 * rows * (3 * 32 + 32) + 4 * heads * 1024
    assert forward["dur"] == pytest.approx(1e9 * max(flop / FLOPS, nbytes / BYTES), abs=1)
    assert backward["dur"] == pytest.approx(2.5 * forward["dur"], abs=2)
    scores = 2 * heads * 1024**2
    assert run.peak["activation"] + run.peak["workspace"] - WORKSPACE < scores


def test_ring_hop_on_a_gpu_is_a_fused_kernel_and_a_merge():
    """Half of the queries see all keys of the other rank, in each of 2 sequences."""
    machine = replace(MACHINE, gemm={**MACHINE.gemm, "bfloat16": MACHINE.gemm["float32"]})
    line = f"{GPU} dtype=bfloat16 sequence=1024 batch=4 layers=1 c=2"
    (run,) = simulate(config_of(line), 29, machine)
    own, other = run.rows[run.rows["op"] == OP.index("attention")][:2]
    heads, keys = 2 * 4, 512
    for hop, queries, scores, launches in (own, 512, 512**2 / 2, 1), (other, 256, 256 * 512, 2):
        flop = 2 * 2 * heads * scores * 8
        nbytes = 2 * heads * 8 * (2 * queries + 2 * keys) + 4 * heads * queries
        merged = heads // 2 * (queries * (8 * (4 + 4 + 2) + 4) + 2 * 4 * keys)
        fused = max(LAUNCH, flop / FLOPS, nbytes / BYTES)
        seconds = fused + launches * LAUNCH + 2 * merged / BYTES
        assert hop["dur"] == pytest.approx(1e9 * seconds, abs=4)


def test_kernel_time_is_launch_plus_moved_bytes():
    """The first kernel of a norm with split rows: it reads x, and writes two numbers per row."""
    _, (run,) = simulated("z=2 scheme=3d hidden=32 heads=4 batch=4")
    norm = run.rows[(run.rows["op"] == OP.index("norm"))][0]
    rows = 4 * 3
    assert norm["dur"] == pytest.approx(1e9 * (LAUNCH + 8 * (rows * 16 + 2 * rows) / BYTES), abs=1)


def test_gradient_reduction_overlaps_only_if_enabled():
    line = "d=2 schedule=none microbatches=2 zero=0 bucket_mb=0.001 hidden=96 batch=96"
    waits = {}
    for overlap in ("true", "false"):
        config, runs = simulated(f"{line} overlap={overlap}")
        found = summary(runs, config, MACHINE)
        waits[overlap] = found["communication"] * found["step_time_s"]
    assert waits["true"] < 0.8 * waits["false"]


ROUND = "schedule=none steps=60 batch=24 sync=stale microbatches=2 dtype=float32 vocabulary=29"


def executed(config, machine, rounds=2):
    """Return the mean time of a step in ns, and the peak memory, of all steps of a round."""
    program, clock = program_of(config), clock_of(machine)
    peers = StageTurns(1).peers(0)
    trainer = simulated_trainer(peers, config, config.model.vocabulary, program, clock)
    every, peaks = config.parallel.local_steps, []
    for number in range(rounds * every):
        trainer.step(number)
    begin = clock.now
    for number in range(rounds * every, (rounds + 1) * every):
        trainer.step(number)
        peaks.append(trainer.mesh.pool.peak["all"])
    return (clock.now - begin) / every, max(peaks)


@pytest.mark.parametrize(("bandwidth", "contention"), [(2e8, 1.5), (3e7, 1.0)])
@pytest.mark.parametrize(
    "line",
    [
        "d=2 local_steps=2",
        "d=2 local_steps=6 bucket_mb=0.005",
        "d=4 local_steps=3 bucket_mb=0.02 outer_momentum=0.9",
        "d=4 shard=2 zero=1 local_steps=8 bucket_mb=0.01",
        "d=4 local_steps=16 bucket_mb=0.01 x=2 batch=48",
        "d=2 local_steps=7 bucket_mb=0 compression=powersgd compression_rank=1 sequence=8",
        "d=2 local_steps=3 bucket_mb=0.01 compression=top-k compression_share=0.05 hidden=48",
    ],
)
def test_step_with_a_stale_agreement_represents_all_steps_of_a_round(line, bandwidth, contention):
    """Communication that takes longer than a round is exposed in both, and the peak is exact."""
    config, links = config_of(f"{ROUND} {line}"), (Link(0, 1e-5, bandwidth),)
    machine = replace(MACHINE, ranks_per_node=1, links=links, contention=contention)
    runs = simulate(config, 29, machine)
    seconds, peak = executed(config, machine)
    assert summary(runs, config, machine)["step_time_s"] == pytest.approx(seconds / 1e9, rel=0.02)
    assert runs[0].peak["all"] == peak
