"""Schedules as strings, their activations in flight, and rejected sizes."""

from collections import Counter

import pytest

from hpc3d.pipeline.schedule import SCHEDULES, find, instruction_streams
from hpc3d.pipeline.step_model import in_flight
from hpc3d.pipeline.timeline import Cost, makespan, timeline
from hpc3d.pipeline.weight_versions import InPlace

SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 5, 8, 13, 16)]


def text(name, *sizes, **steps):
    return [" ".join(map(str, stream)) for stream in instruction_streams(name, *sizes, **steps)[0]]


def test_schedules_match_the_papers():
    assert text("none", 1, 3) == ["F0 B0 F1 B1 F2 B2"]
    assert text("gpipe", 2, 3) == ["F0 F1 F2 B2 B1 B0"] * 2
    assert text("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert text("interleaved", 2, 4, 2) == [
        "F0 F1 1F0 1F1 F2 1B0 F3 1B1 1F2 B0 1F3 B1 1B2 1B3 B2 B3",
        "F0 F1 1F0 1B0 1F1 1B1 F2 B0 F3 B1 1F2 1B2 1F3 1B3 B2 B3",
    ]


def test_asynchronous_schedules_continue_and_update_between_passes():
    assert text("pipedream", 2, 2, steps=2) == [
        "F0 F1 B0 Step F2 B1 Step F3 B2 Step B3 Step",
        "F0 B0 Step F1 B1 Step F2 B2 Step F3 B3 Step",
    ]
    assert text("pipedream-2bw", 2, 2, steps=2) == [
        "F0 F1 B0 F2 B1 Step F3 B2 B3 Step",
        "F0 B0 F1 B1 Step F2 B2 F3 B3 Step",
    ]


def updates_before(stream):
    """Return {microbatch: number of Steps before its F}."""
    steps, found = 0, {}
    for op, mb, _ in stream:
        steps += op == "Step"
        if op == "F":
            found[mb] = steps
    return found


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_weight_staleness_is_bounded(stages):
    for stage, stream in enumerate(instruction_streams("pipedream", stages, 6, steps=3)[0]):
        late = stages - 1 - stage
        assert updates_before(stream) == {mb: max(0, mb - late) for mb in range(18)}
    for stream in instruction_streams("pipedream-2bw", stages, 6, steps=3)[0]:
        behind = {mb // 6 - updates for mb, updates in updates_before(stream).items()}
        assert behind <= {0, 1}
        assert [i.op for i in stream].count("Step") == 3


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_in_flight_match_the_formulas(p, m):
    peaks = {
        name: [in_flight(stream) for stream in instruction_streams(name, p, m)[0]]
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "pipedream")
    }
    assert peaks["gpipe"] == [(m, 0)] * p
    assert peaks["1f1b"] == peaks["pipedream"] == [(min(m, p - i), 0) for i in range(p)]
    assert peaks["zb-h1"] == [(min(m, p - i), min(m, i + 1)) for i in range(p)]
    assert peaks["zb-h2"] == [(min(m, 2 * (p - i) - 1), min(m, 2 * i + 1)) for i in range(p)]
    back = [in_flight(stream).activations for stream in instruction_streams("zb-v", p, m, 2)[0]]
    assert max(back) == min(2 * m, 2 * p)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 7), (4, 11), (3, 3)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_warmup_of_the_interleaved_schedule(p, m, v):
    group = -(-m // (m // p))
    for stage, stream in enumerate(instruction_streams("interleaved", p, m, v)[0]):
        warmup = [i.op for i in stream].index("B") - 1
        assert warmup == min(2 * (p - 1 - stage) + (v - 1) * group, m * v - 1)
        peak = min(2 * (p - 1 - stage) + (v - 1) * group + 1, m * v)
        assert in_flight(stream).activations == peak


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_each_pass_once(name):
    schedule = SCHEDULES[name]
    for p, m in SIZES:
        chunks = schedule.chunks or 3
        if schedule.forbids(p, m, chunks):
            continue
        every = {(mb, chunk) for mb in range(m) for chunk in range(chunks)}
        for stream in instruction_streams(name, p, m, chunks)[0]:
            for op in "FBW":
                found = [tuple(i[1:]) for i in stream if i.op == op]
                assert len(found) == len(set(found))
                assert set(found) == every or (op == "W" and set(found) < every)


@pytest.mark.parametrize(
    ("name", "sizes", "line"),
    [
        ("none", (2, 4, 1), "mesh.p = 2: schedule none .* 1f1b or mesh.p = 1"),
        ("1f1b", (2, 0, 1), "parallel.microbatches = 0: .* 1"),
        ("gpipe", (0, 1, 1), "mesh.p = 0: .* 1"),
        ("1f1b", (2, 4, 2), "parallel.chunks = 2: schedule 1f1b .* 1 chunk per stage; use 1"),
        ("zb-v", (2, 4, 1), "parallel.chunks = 1: schedule zb-v .* 2 chunks per stage; use 2"),
        ("interleaved", (4, 3, 2), "parallel.microbatches = 3: .* 4 .* mesh.p = 3"),
        ("pipedream-2bw", (4, 2, 1), "parallel.microbatches = 2: .* 4 .* mesh.p = 2"),
    ],
)
def test_unsupported_sizes_are_rejected(name, sizes, line):
    with pytest.raises(ValueError, match=f"^{line}$"):
        instruction_streams(name, *sizes)


def test_synchronous_schedule_allows_one_step():
    with pytest.raises(ValueError, match=r"^train.steps = 2: .* schedule 1f1b .* 1"):
        instruction_streams("1f1b", 2, 4, steps=2)


def test_unknown_schedule_is_rejected():
    with pytest.raises(ValueError, match=r"'1f1b1': .*1f1b.* none, gpipe"):
        find("1f1b1")


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_record_matches_its_streams(name):
    schedule, stages = SCHEDULES[name], 1 if name == "none" else 4

    def stage_0(micros):
        return instruction_streams(name, stages, micros, schedule.chunks or 2)[0][0]

    few, many = stage_0(5 * stages), stage_0(8 * stages)
    count = Counter(one.op for one in few)
    assert schedule.splits_backward == (count["W"] > 0)
    assert schedule.keeps_all == (in_flight(few) != in_flight(many))
    if schedule.late_weights:
        last = instruction_streams(name, 4, 20)[0][3]
        assert in_flight(last).weight_inputs == 3 * schedule.late_weights + 1
    assert schedule.asynchronous == (count["Step"] > 0) == (schedule.weights is not InPlace)
    assert schedule.update_per_microbatch == (count["Step"] == 5 * stages)


def test_stages_may_have_different_times():
    costs = [Cost(1, 2, 0), Cost(1, 2, 0), Cost(2, 4, 0)]
    assert makespan(timeline(*instruction_streams("gpipe", 3, 10), costs)) == 10 * 6 + 2 * 3
