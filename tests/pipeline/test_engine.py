"""Memory of a stage during a schedule: microbatches in flight, weight versions, ZeRO shards."""

from itertools import count

import pytest

from hpc3d.comm.threads import run
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.step_model import in_flight
from tests.pipeline.mixes import config_of, trainer_of
from tests.strided import strided

FLIGHTS = [
    "p=1 schedule=none microbatches=4",
    "p=4 schedule=gpipe microbatches=8",
    "p=2 schedule=gpipe microbatches=1",
    "p=4 schedule=1f1b microbatches=8",
    "p=4 schedule=1f1b microbatches=2",
    "p=2 d=2 schedule=1f1b microbatches=3",
    "p=2 schedule=interleaved chunks=4 microbatches=6 layers=8",
    "p=4 schedule=interleaved chunks=2 microbatches=6 layers=8",
    "p=4 schedule=zb-h1 microbatches=8",
    "p=4 schedule=zb-h2 microbatches=8",
    "p=1 schedule=zb-v chunks=2 microbatches=3",
    "p=4 schedule=zb-v chunks=2 microbatches=8 layers=8",
    "p=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4",
    "p=4 schedule=pipedream microbatches=4 tied=false clip=0",
    "p=4 schedule=pipedream-2bw microbatches=6",
]


def held(line, look):
    """Call `look(mesh, trainer)` on every rank after two steps of a mix, or three in flight."""
    config = config_of(f"steps={3 if 'pipedream' in line else 2} vocabulary=48 {line}")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        for number in range(config.train.steps):
            trainer.step(number)
        return look(mesh, trainer)

    return config, run(config.sizes(), rank)


@pytest.mark.parametrize("line", ["p=4 schedule=1f1b", "p=2 d=2 schedule=zb-h1 zero=2"])
@pytest.mark.slow
def test_memory_of_a_microbatch_is_reused(line):
    def stock(mesh, _):
        return sum(len(memory) for free in mesh.pool.free.values() for memory in free)

    few, many = (held(f"{line} microbatches={m} batch={6 * m}", stock)[1] for m in (4, 16))
    assert few == many and min(few) > 0


def test_engine_sums_seconds_by_operation():
    """The clock advances by a second per call, so each instruction takes one second."""
    config = config_of("p=2 schedule=1f1b microbatches=3")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.engine.clock = count(5).__next__
        trainer.step(0)
        return dict(trainer.engine.seconds)

    both = {"F": 3, "BW": 3, "Reduce": 1, "Step": 1}
    first, last = {"SendF": 3, "RecvB": 3}, {"RecvF": 3, "SendB": 3}
    assert run({"p": 2}, rank) == [both | first, both | last]


def test_time_of_a_pair_is_divided_among_its_passes():
    """F0 1F0 F1+1BW0 1F1+BW0 1BW1 B1 W1: a pair reads the clock six times, and takes 5 seconds."""
    line = "e=2 schedule=dualpipe-v microbatches=2 experts=4 layers=2 overlap_experts=true"

    def rank(mesh):
        trainer = trainer_of(mesh, config_of(line))
        trainer.engine.clock = count(5).__next__
        trainer.step(0)
        return trainer.engine.seconds

    for seconds in run({"e": 2}, rank):
        assert seconds["F"] + seconds["BW"] == pytest.approx(2 + 2 * 5 + 1)
        assert min(seconds["F"] - 2, seconds["BW"] - 1) > 4
        assert seconds["B"] == seconds["W"] == 1


@pytest.mark.parametrize("line", strided(FLIGHTS, 3))
def test_microbatches_in_flight_match_the_instruction_stream(line):
    config, peaks = held(line, lambda mesh, trainer: trainer.engine.peak)
    parallel, stages = config.parallel, config.mesh.p
    steps = 3 if parallel.schedule.startswith("pipedream") else 1
    sizes = stages, parallel.microbatches, parallel.chunks, steps
    expected = [
        in_flight(stream).activations
        for stream in instruction_streams(parallel.schedule, *sizes)[0]
    ]
    assert peaks == [peak for peak in expected for _ in range(config.mesh.d)]


@pytest.mark.slow
def test_activations_in_flight_match_the_published_numbers():
    """GPipe m; 1F1B and PipeDream min(m, p - i); ZB-H2 2p - 2i - 1; ZB-V 2p chunks."""
    published = {
        "gpipe microbatches=8": [8, 8, 8, 8],
        "1f1b microbatches=8": [4, 3, 2, 1],
        "1f1b microbatches=2": [2, 2, 2, 1],
        "zb-h1 microbatches=8": [4, 3, 2, 1],
        "zb-h2 microbatches=8": [7, 5, 3, 1],
        "zb-v microbatches=8 chunks=2 layers=8": [8, 8, 8, 8],
        "pipedream microbatches=4 tied=false clip=0": [4, 3, 2, 1],
    }
    for words, peaks in published.items():
        line = f"p=4 schedule={words}"
        assert held(line, lambda mesh, trainer: trainer.engine.peak)[1] == peaks


def activations(schedule, micros):
    """Return the peak of each stage in bytes, for microbatches of six sequences."""
    line = f"p=4 schedule={schedule} microbatches={micros} batch={6 * micros}"
    return held(line, lambda mesh, trainer: mesh.pool.peak["activation"])[1]


def test_activation_bytes_follow_the_microbatches_in_flight():
    two, four, eight = (activations("gpipe", micros) for micros in (2, 4, 8))
    grown = [(b - a, c - b) for a, b, c in zip(two, four, eight)]
    assert all(later == 2 * first > 0 for first, later in grown)
    short, long = (activations("1f1b", micros) for micros in (4, 8))
    assert short == long
    # Stages 1 and 2 are alike, but stage 1 has one more microbatch in flight.
    assert long[1] - long[2] == grown[1][0] // 2


def bytes_by_kind(line):
    """Return, for rank 0, {kind: bytes}, and the elements of matrices and of all parameters."""

    def look(mesh, trainer):
        sizes = {item.name: item.value.size for item in trainer.parameters}
        matrices = sum(n for name, n in sizes.items() if name.endswith(("weight", "token")))
        return dict(mesh.pool.live), 8 * matrices, 8 * sum(sizes.values())

    return held(line, look)[1][0]


@pytest.mark.parametrize("pipeline", ["schedule=none", "p=2 schedule=zb-h1"])
@pytest.mark.parametrize("data", strided([2, 4], 2))
def test_zero_shards_optimizer_state_gradients_and_parameters(data, pipeline):
    line = f"{pipeline} d={data} microbatches=3"
    found = [bytes_by_kind(f"{line} zero={zero}") for zero in range(4)]
    whole, matrices, every = found[0]
    part = every - matrices + matrices // data
    assert whole["parameter"] == whole["gradient"] == every == whole["optimizer"] // 2
    for zero, (live, _, _) in enumerate(found[1:], 1):
        assert live["optimizer"] == whole["optimizer"] // data
        assert live["gradient"] == (part if zero >= 2 else every)
        assert live["parameter"] == (part if zero == 3 else every)


def versions(line):
    """Return the weight copies of each of four stages, at the peak of a step and after it."""

    def look(mesh, trainer):
        size, pool = trainer.parameters.value.nbytes, mesh.pool
        return pool.peak["parameter"] / size, pool.live["parameter"] / size

    return held(f"p=4 microbatches=8 {line}", look)[1]


def test_weight_versions_of_asynchronous_schedules():
    """PipeDream has p - i on stage i, and at least two; PipeDream-2BW has two."""
    assert versions("schedule=1f1b") == [(1, 1)] * 4
    stashed = versions("schedule=pipedream tied=false clip=0")
    assert stashed == [(4, 1), (3, 1), (2, 1), (2, 1)]
    assert versions("schedule=pipedream-2bw") == [(2, 2)] * 4
