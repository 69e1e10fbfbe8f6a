"""Schedules as strings, their sizes in memory, and what they refuse."""

import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.pipeline.closed_forms import StageTimes
from hpc3d.pipeline.csv_schedule import from_csv, to_csv
from hpc3d.pipeline.instruction import COMPUTE, MESSAGES, Instruction, Placement, numbered, parse
from hpc3d.pipeline.passes import in_flight
from hpc3d.pipeline.schedule import SCHEDULES, find, streams
from hpc3d.pipeline.timeline import Cost, makespan, timeline
from hpc3d.pipeline.weight_versions import InPlace

SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 5, 8, 13, 16)]


def text(name, *sizes, **steps):
    return [" ".join(map(str, stream)) for stream in streams(name, *sizes, **steps)[0]]


def test_schedules_as_they_are_written_in_papers():
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


def test_zero_bubble_schedules():
    assert text("zb-h1", 3, 4) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert text("zb-h2", 2, 4) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert text("zb-v", 2, 3, 2) == [
        "F0 F1 F2 1F0 1B0 1W0 1F1 1B1 1W1 B0 W0 1F2 1B2 1W2 B1 W1 B2 W2",
        "F0 1F0 F1 1F1 1B0 1W0 F2 B0 W0 1F2 1B1 1W1 B1 1B2 B2 W1 1W2 W2",
    ]
    assert text("zb-v", 2, 1, 2) == ["F0 1F0 1B0 1W0 B0 W0", "F0 1F0 1B0 1W0 B0 W0"]


def test_asynchronous_schedules_run_on_and_update_on_their_way():
    assert text("pipedream", 2, 2, steps=2) == [
        "F0 F1 B0 Step F2 B1 Step F3 B2 Step B3 Step",
        "F0 B0 Step F1 B1 Step F2 B2 Step F3 B3 Step",
    ]
    assert text("pipedream-2bw", 2, 2, steps=2) == [
        "F0 F1 B0 F2 B1 Step F3 B2 B3 Step",
        "F0 B0 F1 B1 Step F2 B2 F3 B3 Step",
    ]


def updates_before(stream):
    """Microbatch -> number of Steps before its F."""
    steps, found = 0, {}
    for op, mb, _ in stream:
        steps += op == "Step"
        if op == "F":
            found[mb] = steps
    return found


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_weights_are_stale_by_a_known_number_of_updates(stages):
    for stage, stream in enumerate(streams("pipedream", stages, 6, steps=3)[0]):
        late = stages - 1 - stage
        assert updates_before(stream) == {mb: max(0, mb - late) for mb in range(18)}
    for stream in streams("pipedream-2bw", stages, 6, steps=3)[0]:
        behind = {mb // 6 - updates for mb, updates in updates_before(stream).items()}
        assert behind <= {0, 1}
        assert [i.op for i in stream].count("Step") == 3


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_in_flight(p, m):
    peaks = {
        name: [in_flight(stream) for stream in streams(name, p, m)[0]]
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "pipedream")
    }
    assert peaks["gpipe"] == [(m, 0)] * p
    assert peaks["1f1b"] == peaks["pipedream"] == [(min(m, p - i), 0) for i in range(p)]
    assert peaks["zb-h1"] == [(min(m, p - i), min(m, i + 1)) for i in range(p)]
    assert peaks["zb-h2"] == [(min(m, 2 * (p - i) - 1), min(m, 2 * i + 1)) for i in range(p)]
    back = [in_flight(stream).activations for stream in streams("zb-v", p, m, 2)[0]]
    assert max(back) == min(2 * m, 2 * p)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_inputs_of_w_before_a_b(p):
    for name, lag in (("zb-h1", 1), ("zb-h2", 2)):
        for stage, stream in enumerate(streams(name, p, 32)[0]):
            done = Counter()
            waiting = []
            for op, *_ in stream:
                waiting += [done["B"] - done["W"]] * (op == "B")
                done[op] += 1
            assert max(waiting) == lag * stage


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 7), (4, 11), (3, 3)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_warm_up_of_interleaved(p, m, v):
    group = -(-m // (m // p))
    for stage, stream in enumerate(streams("interleaved", p, m, v)[0]):
        warmup = [i.op for i in stream].index("B") - 1
        assert warmup == min(2 * (p - 1 - stage) + (v - 1) * group, m * v - 1)
        peak = min(2 * (p - 1 - stage) + (v - 1) * group + 1, m * v)
        assert in_flight(stream).activations == peak


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_once(name):
    schedule = SCHEDULES[name]
    for p, m in SIZES:
        chunks = schedule.chunks or 3
        if schedule.forbids(p, m, chunks):
            continue
        every = {(mb, chunk) for mb in range(m) for chunk in range(chunks)}
        for stream in streams(name, p, m, chunks)[0]:
            for op in "FBW":
                found = [tuple(i[1:]) for i in stream if i.op == op]
                assert len(found) == len(set(found))
                assert set(found) == every or (op == "W" and not found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_record_says_what_its_streams_do(name):
    schedule, stages = SCHEDULES[name], 1 if name == "none" else 4

    def stage_0(micros):
        return streams(name, stages, micros, schedule.chunks or 2)[0][0]

    few, many = stage_0(5 * stages), stage_0(8 * stages)
    count = Counter(one.op for one in few)
    assert schedule.splits_backward == (count["W"] > 0)
    assert schedule.keeps_all == (in_flight(few) != in_flight(many))
    assert schedule.asynchronous == (count["Step"] > 0) == (schedule.weights is not InPlace)
    assert schedule.update_per_microbatch == (count["Step"] == 5 * stages)


UNEVEN = StageTimes((1, 1, 1.5, 1), (2, 1.5, 1.5, 2), (0.5, 1, 1, 2), 0.1)
SYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if not schedule.asynchronous]


@pytest.mark.parametrize("micros", [4, 11, 40, 43])
@pytest.mark.parametrize("name", [name for name in SYNCHRONOUS if name != "none"])
def test_without_a_closed_form_the_time_is_that_of_the_timeline(name, micros):
    chunks = SCHEDULES[name].chunks or 2
    costs = [Cost(*each, UNEVEN.message) for each in zip(*UNEVEN[:3])]
    exact = makespan(timeline(*streams(name, 4, micros, chunks), costs))
    found = SCHEDULES[name]._replace(closed_form=None).seconds(micros, chunks, UNEVEN)
    assert found == pytest.approx(exact, rel=1e-9)


def test_stages_may_take_different_times():
    costs = [Cost(1, 2, 0), Cost(1, 2, 0), Cost(2, 4, 0)]
    assert makespan(timeline(*streams("gpipe", 3, 10), costs)) == 10 * 6 + 2 * 3


instructions = st.one_of(
    st.builds(
        Instruction,
        st.sampled_from([*COMPUTE, *MESSAGES]),
        st.integers(0, 999_999),
        st.integers(0, 99),
    ),
    st.builds(Instruction, st.just("Reduce"), st.just(-1), st.integers(0, 99)),
    st.just(Instruction("Step")),
)


CELLS = st.sampled_from(["F0", "B0", "W0", "BW0", "F1", "B1", "1F0", "1B0", "F3"]) | st.text(
    max_size=4
)


@given(st.lists(st.lists(CELLS, max_size=6), max_size=3), st.sampled_from([",", ",,", " , "]))
def test_any_file_is_read_or_refused_in_a_line(tmp_path_factory, rows, comma):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes("\n".join(comma.join(row) for row in rows).encode())
    try:
        table = from_csv(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ") and len(str(error).splitlines()) == 1
    else:
        assert table.micros and len(table.streams) == table.placement.stages


@given(instructions)
def test_an_instruction_is_read_as_it_is_written(instruction):
    assert parse(str(instruction)) == instruction


def test_instructions_as_text():
    assert [str(i) for i in numbered("FFBfw")] == ["F0", "F1", "B0", "1F0", "1W0"]
    assert parse("0F3") == parse("F3") == ("F", 3, 0)
    assert parse("12RecvB3") == ("RecvB", 3, 12)
    assert str(Instruction("Reduce", chunk=1)) == "1Reduce"


@pytest.mark.parametrize(
    "nonsense", ["", "F", "f3", "3", "F-1", "Step1", "1Step", "Reduce3", "FB2"]
)
def test_nonsense_is_no_instruction(nonsense):
    with pytest.raises(ValueError, match=re.escape(repr(nonsense))):
        parse(nonsense)


@pytest.mark.parametrize(("turn", "v"), [(False, 1), (False, 3), (True, 2)])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_places_of_parts(p, v, turn):
    placement = Placement(p, v, turn)
    places = [placement.place(part) for part in range(placement.parts)]
    assert sorted(places) == [(stage, chunk) for stage in range(p) for chunk in range(v)]
    assert [placement.part(*place) for place in places] == list(range(p * v))
    assert [placement.first(*place) for place in places].index(True) == 0
    assert [placement.last(*place) for place in places].index(True) == p * v - 1
    for (stage, chunk), (after, chunk_after) in pairwise(places):
        if stage != after:
            send, receive = Instruction("SendF", 3, chunk), Instruction("RecvF", 3, chunk_after)
            assert placement.other(stage, send) == (after, receive)
            assert placement.other(after, receive) == (stage, send)
            send, receive = Instruction("SendB", 3, chunk_after), Instruction("RecvB", 3, chunk)
            assert placement.other(after, send) == (stage, receive)
            assert placement.other(stage, receive) == (after, send)


def test_the_turn_of_a_v():
    placement = Placement(4, 2, turn=True)
    assert [placement.part(stage, 1) for stage in range(4)] == [7, 6, 5, 4]
    assert placement.first(0, 0)
    assert placement.last(0, 1)
    for stage, message in ((3, "SendF0"), (3, "1RecvF0"), (0, "RecvF0"), (0, "1SendF0")):
        with pytest.raises(ValueError, match=f"stage {stage}: {message}: "):
            placement.other(stage, parse(message))


@pytest.mark.parametrize(
    ("name", "sizes", "line"),
    [
        ("none", (2, 4, 1), "mesh.p = 2: schedule none .* 1f1b or mesh.p = 1"),
        ("1f1b", (2, 0, 1), "parallel.microbatches = 0: .* 1"),
        ("gpipe", (0, 1, 1), "mesh.p = 0: .* 1"),
        ("1f1b", (2, 4, 2), "parallel.chunks = 2: schedule 1f1b .* 1"),
        ("zb-v", (2, 4, 1), "parallel.chunks = 1: schedule zb-v .* 2"),
        ("interleaved", (4, 3, 2), "parallel.microbatches = 3: .* 4 .* mesh.p = 3"),
        ("pipedream-2bw", (4, 2, 1), "parallel.microbatches = 2: .* 4 .* mesh.p = 2"),
    ],
)
def test_sizes_that_are_forbidden(name, sizes, line):
    with pytest.raises(ValueError, match=f"^{line}$"):
        streams(name, *sizes)


def test_a_synchronous_schedule_is_one_step():
    with pytest.raises(ValueError, match=r"steps = 2: schedule 1f1b .* 1"):
        streams("1f1b", 2, 4, steps=2)


def test_an_unknown_schedule():
    with pytest.raises(ValueError, match=r"'1f1b1': .*1f1b.* none, gpipe"):
        find("1f1b1")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h2", "zb-v"])
def test_a_schedule_survives_its_file(tmp_path, name):
    chunks = SCHEDULES[name].chunks or 2
    written, placement = streams(name, 3, 7, chunks)
    to_csv(tmp_path / "schedule.csv", written, placement)
    assert streams(f"csv:{tmp_path / 'schedule.csv'}", 3, 7, chunks) == (written, placement)


def csv_file(folder, rows):
    (folder / "s.csv").write_text(rows, encoding="utf-8")
    return folder / "s.csv"


def test_blank_cells_ragged_rows_and_explicit_chunks(tmp_path):
    path = csv_file(tmp_path, "\ufeff0F0, F1,,BW0,B1\r\n\r\nF0,,,B0,F1,B1,,\r\n,,\r\n")
    table = from_csv(path)
    assert [" ".join(map(str, stream)) for stream in table.streams] == [
        "F0 F1 BW0 B1",
        "F0 B0 F1 B1",
    ]
    assert (table.placement, table.micros) == (Placement(2, 1), 2)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("", ".*row"),
        ("turn\n", ".*row"),
        ("F0,B0\nF0,B0,X1\n", "row 2, column 3: 'X1' "),
        ("F0,SendF0,B0\n", "row 1, column 2: SendF0 .* F, B, W and BW"),
        ("F0,B0,Step\n", "row 1, column 3: Step .* F, B, W and BW"),
        ("F0,B0\nF0,,B0,F0\n", "row 2, column 4: F0 .*twice"),
        ("F0,B0,BW0\n", "row 1, column 3: BW0 .*twice"),
        ("B0,F0\n", "row 1, column 1: B0 .*F0"),
        ("F0,W0,B0\n", "row 1, column 2: W0 .*B0"),
        ("F0,B0,F1,B1\nF0,B0,F1\n", "row 2: no B1"),
        ("F0,B0,F2,B2\n", "row 1: no F1"),
        ("F0,1F0,1B0,B0\nF0,B0\n", "row 2: no 1F0"),
        ("turn\nF0,B0\n", "row 1: .* turn .* 0 and 1, .* 1"),
    ],
)
def test_a_file_that_is_no_schedule(tmp_path, rows, fault):
    with pytest.raises(ValueError, match=rf"s\.csv: {fault}"):
        from_csv(csv_file(tmp_path, rows))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"none\.csv: No such file"):
        find(f"csv:{tmp_path / 'none.csv'}")
    (tmp_path / "binary.csv").write_bytes(b"F0,\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.csv: .*CSV .*UTF-8"):
        find(f"csv:{tmp_path / 'binary.csv'}")


def test_a_file_has_its_own_sizes(tmp_path):
    found = find(f"csv:{csv_file(tmp_path, 'F0,B0,F1,B1' + chr(10))}")
    assert found.forbids(1, 2, 1) is None
    assert "mesh.p = 2: " in found.forbids(2, 2, 1)
    assert "parallel.microbatches = 3: " in found.forbids(1, 3, 1)
    assert "parallel.chunks = 2: " in found.forbids(1, 2, 2)
