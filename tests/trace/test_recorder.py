"""Rows and memory of the recorder of a rank, with a test clock."""

import tracemalloc

import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.comm.mesh import NullRecorder
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.trace.recorder import MOST, ROW, Recorder
from hpc3d.trace.schema import CATEGORY, MEMORY_KIND, OP, PHASE
from hpc3d.trace.segment import count_segments, read_segment, segment_path
from tests.trace.recording import HEADER, end_step, recorded


def test_span_is_one_event_row(recorder, clock):
    recorder.begin_step(7)
    with recorder.scope(2, "backward"), recorder.span("product", "gemm", flops=48):
        clock.skip(500)
    with recorder.scope(phase="optimizer"), recorder.span("update"):
        pass
    segment = recorded(recorder)
    first, second = segment.events
    assert first["dur"] == 510
    assert first["t_start"] == first["t_global"] == second["t_start"] - 520
    assert (first["rank"], first["step"], first["layer"], first["flops"]) == (3, 7, 2, 48)
    assert (first["group"], first["seq"], first["peer"], first["parent"]) == (-1, -1, -1, -1)
    names = [segment.header["strings"][row["name"]] for row in (first, second)]
    assert names == ["product", "update"]
    assert [CATEGORY[row["category"]] for row in (first, second)] == ["compute", "optimizer"]
    assert [PHASE[row["phase"]] for row in (first, second)] == ["backward", "optimizer"]
    assert [OP[row["op"]] for row in (first, second)] == ["gemm", "elementwise"]


def test_step_row_has_its_memory_peaks(recorder):
    pool = Pool()
    held = pool.empty((10,), "float64", "gradient")
    recorder.begin_step(4)
    dropped = pool.empty((100,), "float64", "activation")
    del dropped
    end_step(recorder, pool)
    recorder.phase = "forward"
    with recorder.span("between steps"):
        pass
    del held
    segment = recorded(recorder)
    (step,) = segment.steps
    assert step["t_end"] - step["t_start"] == 10
    names = ["rank", "step", "tokens", "loss", "grad_norm", "learning_rate"]
    assert [step[name] for name in names] == [3, 4, 96, 5.5, 2.0, 1e-3]
    assert (step["forward_s"], step["backward_s"], step["skipped"]) == (0.25, 0.5, 0)
    memory = {MEMORY_KIND[row["kind"]]: (row["bytes"], row["peak"]) for row in segment.memory}
    assert memory["gradient"] == (80, 80)
    assert memory["activation"] == (0, 800)
    assert memory["all"] == (80, 880)
    assert segment.events["step"].tolist() == [-1]


def fill(recorder, events):
    recorder.begin_step(0)
    for number in range(events):
        with recorder.span("event", flops=number):
            pass


def test_full_table_grows_and_keeps_every_event(recorder):
    fill(recorder, 1000)
    segment = recorded(recorder)
    assert segment.events["flops"].tolist() == [*range(1000)]
    assert segment.header["dropped"] == 0
    assert recorder.capacity == 1024


@pytest.mark.parametrize(
    ("events", "most", "capacity"),
    [(64, 1000, 64), (65, 1000, 128), (129, 1000, 256), (129, 192, 192), (193, 192, 192)],
)
def test_a_full_table_doubles_up_to_its_limit(events, most, capacity, tmp_path, clock):
    """The table stores exactly `capacity` events before it grows or drops the next one."""
    recorder = Recorder(tmp_path, HEADER, capacity=64, clock=clock, most=most)
    fill(recorder, events)
    assert (recorder.capacity, len(recorder.table)) == (capacity, capacity * ROW.size)
    segment = recorded(recorder)
    assert (len(segment.events), segment.header["dropped"]) == (
        min(events, most),
        max(0, events - most),
    )


def test_table_is_at_most_one_gibibyte():
    assert MOST * ROW.size <= 2**30 < (MOST + 1) * ROW.size


def test_table_at_its_limit_counts_dropped_events(tmp_path, clock):
    recorder = Recorder(tmp_path, HEADER, capacity=64, clock=clock, most=100)
    fill(recorder, 170)
    segment = recorded(recorder)
    assert segment.events["flops"].tolist() == [*range(100)]
    assert segment.header["dropped"] == 70


def test_read_span_has_category_io(recorder):
    with recorder.span("read the text", "none"):
        pass
    (row,) = recorded(recorder).events
    assert (CATEGORY[row["category"]], OP[row["op"]]) == ("io", "none")


def test_segment_is_written_between_steps_only_when_due(recorder, clock, tmp_path):
    def step(number, events):
        recorder.begin_step(number)
        for _ in range(events):
            with recorder.span("event"):
                pass
        end_step(recorder)
        return count_segments(tmp_path).get(3, 0)

    assert step(0, 32) == 0  # half full is not yet more than half
    assert step(1, 1) == 1
    assert step(2, 1) == 1
    clock.skip(31_000_000_000)
    assert step(3, 1) == 2
    events = [read_segment(segment_path(tmp_path, 3, number), 3).events for number in (0, 1)]
    assert [part["step"].tolist() for part in events] == [[0] * 32 + [1], [2, 3]]


def test_event_retains_no_memory(tmp_path, clock):
    recorder = Recorder(tmp_path, HEADER, capacity=6000, clock=clock)

    def events():
        for _ in range(3000):
            with recorder.span("event", "gemm", 1.0):
                pass

    events()
    tracemalloc.start()
    events()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 3000


@pytest.mark.parametrize("kind", ["records", "keeps rows in memory", "records nothing"])
def test_scope_sets_and_restores_layer_and_phase(recorder, kind):
    """Scopes may be nested, and may be left by an error."""
    if kind != "records":
        recorder = NullRecorder() if kind == "records nothing" else MemoryRecorder(0, lambda: 0)
    seen = []

    def look():
        seen.append((recorder.layer, recorder.phase))

    look()
    with pytest.raises(KeyError), recorder.scope(phase="backward"):
        look()
        with recorder.scope(layer=2):
            look()
            with recorder.scope(layer=5, phase="recompute"):
                look()
            look()
            with recorder.scope(layer=0, phase="optimizer"):
                look()
                raise KeyError
    look()
    back = -1, "backward"
    inside = [(2, "backward"), (5, "recompute"), (2, "backward"), (0, "optimizer")]
    assert seen == [(-1, "other"), back, *inside, (-1, "other")]


@pytest.mark.parametrize("rank", [0, 3])
def test_evaluation_is_a_row_of_rank_0(rank, tmp_path, clock):
    recorder = Recorder(tmp_path, {**HEADER, "rank": rank}, 8, clock=clock)
    recorder.begin_step(0)
    end_step(recorder)
    with recorder.scope(phase="evaluation"), recorder.span("gemm", "gemm"):
        pass
    recorder.end_evaluation(0, 2.5, 96, 0.25, 0.5, [(2.0, 32, 0.5), (3.0, 64, 0.0)])
    recorder.flush()
    found = read_segment(segment_path(tmp_path, rank, 0), rank)
    assert found.evaluation.tolist() == [(0, 2.5, 96, 0.25, 0.5)] * (rank == 0)
    texts = [(0, 0, 2.0, 32, 0.5), (0, 1, 3.0, 64, 0.0)]
    assert found.validation.tolist() == texts * (rank == 0)
    assert found.events["step"].tolist() == [-1]
    assert PHASE[found.events["phase"][0]] == "evaluation"
    recorder.flush()
    again = read_segment(segment_path(tmp_path, rank, 1), rank)
    assert not len(again.evaluation) and not len(again.validation)


def test_long_evaluation_does_not_fill_the_table(tmp_path, clock):
    recorder = Recorder(tmp_path, HEADER, 8, clock=clock)
    for number in range(3):
        for _ in range(5):
            recorder.mark("m")
        recorder.end_evaluation(number, 2.5, 96, 0.25, 0.5)
    assert (recorder.capacity, recorder.segments) == (8, 3)
