"""What is said of a run while it goes on."""

import numpy as np
import pytest

from hpc3d.analyze.live import inside, screen, sparkline, state
from hpc3d.runtime.metrics_file import MetricsFile
from hpc3d.trace.schema import CATEGORY, CLOCK_SAMPLES, EVENTS, MEMORY, OP, STEPS, record_type
from hpc3d.trace.segment import segment_path, write_segment

MS = 10**6


def segment(run, rank, number, calls, step=0):
    """Of a step of 100 ms: `calls` are (operation, number of the call, start, duration) in ms."""
    events = np.zeros(len(calls), record_type(EVENTS))
    for row, (op, seq, start, dur) in zip(events, calls, strict=True):
        row["category"], row["op"], row["seq"] = CATEGORY.index("comm"), OP.index(op), seq
        row["t_start"] = row["posted"] = start * MS
        row["dur"], row["rank"], row["step"] = dur * MS, rank, step
    steps = np.zeros(1, record_type(STEPS))
    steps["rank"], steps["step"], steps["t_end"] = rank, step, 100 * MS
    header = {"rank": rank, "groups": [{"axis": "x", "members": [0, 1]}], "world_size": 2}
    none = np.zeros(0, record_type(MEMORY)), np.zeros(0, record_type(CLOCK_SAMPLES))
    write_segment(segment_path(run, rank, number), header, [""], events, steps, *none)


def records(run, numbers, steps=10, **values):
    metrics = MetricsFile(run, 0, [], print)
    for number in numbers:
        metrics.write(
            **{"step": number, "steps": steps, "loss": 6.0 - number, "seconds": 2.0}
            | {"tokens_per_s": 1000.0, "communication": 0.5, "peak_bytes": 10**7}
            | values
        )


def test_who_waits_for_whom(tmp_path):
    """Rank 0 waits 20 of its 30 ms for rank 1, which then waits 5 of 10 ms; a message is waited
    for as long as it takes."""
    segment(tmp_path, 0, 0, [("all_gather", 0, 10, 30), ("all_reduce", 1, 65, 5)])
    segment(tmp_path, 1, 0, [("all_gather", 0, 30, 10), ("all_reduce", 1, 60, 10)])
    found = inside(tmp_path)
    assert found.calls == {"x": pytest.approx(55 / 200)}
    assert found.waits == {"x": pytest.approx((20 + 5) / 200)}
    assert found.late == {1: 1, 0: 1}
    segment(tmp_path, 0, 1, [("recv", 0, 10, 40)], step=1)
    assert inside(tmp_path).waits == {"x": pytest.approx(40 / 200)}  # the newest of each rank


def test_what_cannot_be_read_is_passed_over(tmp_path):
    assert inside(tmp_path) is None
    segment(tmp_path, 0, 0, [("all_gather", 0, 10, 30)])
    segment_path(tmp_path, 1, 0).write_bytes(b"PK half")
    found = inside(tmp_path)
    assert (found.ranks, found.waits) == (1, {"x": 0.0})


def test_a_run_goes_on_is_silent_and_ends(tmp_path):
    last = {"time": 1000.0, "seconds": 2.0}
    assert state(tmp_path, [], 0) == "begins"
    assert state(tmp_path, [last], 1059) == "running"
    assert state(tmp_path, [last], 1061) == "silent for 1 min 1 s"
    assert state(tmp_path, [last | {"seconds": 30.0}], 1149) == "running"
    log = tmp_path / "train.log"
    log.write_text("step     loss\n   1   3.0\nrun kept in results/a\n")
    assert state(tmp_path, [last], 9e9) == "ended"
    log.write_text(log.read_text() + "resume\nstep     loss\n   2   3.0\n")
    assert state(tmp_path, [last], 1001) == "running"
    log.write_text(log.read_text() + "stopped after step 2, for SIGTERM\nrun kept in results/a\n")
    assert state(tmp_path, [last], 1001) == "stopped"


def test_the_screen_has_progress_loss_and_axes(tmp_path):
    records(tmp_path, range(4))
    MetricsFile(tmp_path, 4, [], print).write(step=3, validation_loss=3.25)
    segment(tmp_path, 0, 0, [("all_gather", 0, 10, 30)])
    text = "\n".join(screen(tmp_path, 100))
    assert "step 4 of 10, 40%, 12 s left" in text
    assert "loss 3.0000, 6.0000 at first  █▆▃▁" in text
    assert "1,000 tokens/s, 2.00 s a step; communication 50.0%; peak 10.0 MB" in text
    assert "validation 3.2500 after step 3" in text
    assert "\nx           30.0%" in text


@pytest.mark.parametrize("width", [20, 40, 80])
def test_no_line_is_wider_than_the_terminal(tmp_path, width):
    records(tmp_path, range(40), steps=40)
    segment(tmp_path, 0, 0, [("recv", 0, 0, 100)])
    assert max(map(len, screen(tmp_path, width))) <= width


def test_losses_that_are_no_numbers_are_shown(tmp_path):
    records(tmp_path, range(3), loss=float("nan"))
    assert any("???" in line for line in screen(tmp_path, 80))
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline(range(100), 5) == "▁▃▅▆█"
