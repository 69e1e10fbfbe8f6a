"""Time between steps."""

import pytest

from hpc3d.analyze.metrics.step import between_rows, time_rows
from tests.analyze.traces import by_hand, event, opened

IO = 5


def outside(name, start, dur):
    return event("F0", start, dur, step=-1, name=name, category=IO)


def test_time_between_steps_is_counted_by_event_name(tmp_path):
    """Rank 0 takes two snapshots, and rank 1 takes one."""
    events = {
        0: [event("F0", 0, 10), outside(0, 60, 2), outside(0, 70, 4)],
        1: [event("F0", 0, 10), outside(0, 60, 6)],
    }
    with opened(by_hand(tmp_path, events)) as trace:
        (row,) = between_rows(trace)
        assert all(each["category"] != "io" for each in time_rows(trace))
    assert (row["name"], row["category"]) == ("event", "io")
    found = [row[key] for key in ("times", "mean_s", "longest_s", "seconds")]
    assert found == pytest.approx([1.5, 4e-3, 6e-3, 6e-3])


def test_between_rows_are_empty_without_events_outside_steps(tmp_path):
    with opened(by_hand(tmp_path, {0: [event("F0", 0, 10)]})) as trace:
        assert between_rows(trace) == []
