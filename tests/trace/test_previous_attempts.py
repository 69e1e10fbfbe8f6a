"""The trace of a resumed run includes the steps of previous attempts."""

import json
import re
from functools import partial
from itertools import count, product

import h5py
import numpy as np
import pytest

import hpc3d.trace
from hpc3d.benchmarks.harness import RandomBatches
from hpc3d.comm import threads
from hpc3d.runtime import metrics_file
from hpc3d.trace import merge as merging
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.merge import merge
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.segment import segment_path
from hpc3d.training.run_folder import set_aside
from hpc3d.training.trainer import Trainer
from tests.analyze.traces import config_of, header
from tests.trace import small

RANKS = 2
PIPELINE = {
    "mesh__p": 2,
    "parallel__schedule": "1f1b",
    "parallel__microbatches": 2,
    "model__layers": 2,
}
FLAT = {"mesh__x": 2, "model__layers": 2}
CREATED = "2025-01-02T03:04:{:02}+00:00"


def clock_from(start):
    """Return a clock of all ranks, which advances by a microsecond per reading."""
    return partial(next, count(start, 1000))


SOME = clock_from(10**15)


def attempt(folder, first, last, created=5, clock=SOME, layout=PIPELINE, **changes):
    """Move the previous trace aside, and train steps `first` to `last` - 1 of a run."""
    config = config_of(RANKS, train__steps=last, **layout)
    aside = len([*folder.glob("config-*.toml")])
    if (folder / "trace").exists():
        merge(folder)
        (folder / "config.toml").touch()
        set_aside(folder, aside + 1)

    def rank(mesh):
        top = {**header(config, mesh.rank, RANKS), "created_utc": CREATED.format(created)}
        recorder = Recorder(folder, top | changes, clock=clock)
        batches = RandomBatches(config, 17) if mesh.rank == 0 else None
        trainer = Trainer(mesh.traced(recorder), config, 17, batches)
        for number in range(first, last):
            trainer.step(number)
            with trainer.mesh.trace.span("snapshot", "none"):  # between steps
                pass
            texts = [(first + loss, 17, 0.25) for loss in (0.25, 0.75)]
            trainer.mesh.trace.end_evaluation(number, first + 0.5, 34, 0.25, 0.1, texts)
        recorder.flush()

    threads.run(config.sizes(), rank)
    merge(folder)


def opened(folder, name="trace.h5"):
    return hpc3d.trace.open(folder / name)


def steps_of(trace, rank=0):
    return trace.steps["step"][trace.steps["rank"] == rank].tolist()


def rows(trace, *names):
    """Return the values of some columns by rank and step, in file order."""
    events, found = trace.events, {}
    columns = [events[name].tolist() for name in ("rank", "step", *names)]
    for rank, step, *values in zip(*columns, strict=True):
        found.setdefault((rank, step), []).append(values)
    return found


def test_expert_loads_of_kept_steps_are_preserved(tmp_path):
    layout = {"mesh__e": 2, "model__layers": 1, "model__experts": 4, "model__capacity": 1.0}
    attempt(tmp_path, 0, 3, layout=layout)
    attempt(tmp_path, 2, 4, layout=layout)
    with opened(tmp_path) as trace:
        assert violations(trace) == []
        for table, rows in ((trace.experts, 4), (trace.routers, 1)):
            for rank in range(RANKS):
                assert table["step"][table["rank"] == rank].tolist() == [
                    step for step in range(4) for _ in range(rows)
                ]


SAME = ("op", "category", "bytes", "count", "peer", "microbatch", "stage", "layer", "dur")


@pytest.mark.slow
def test_kept_steps_are_followed_by_those_of_the_new_attempt(tmp_path):
    attempt(tmp_path, 0, 4)
    attempt(tmp_path, 2, 6)
    with opened(tmp_path, "trace-1.h5") as trace:
        before = rows(trace, *SAME, "t_start")
        assert steps_of(trace) == [0, 1, 2, 3]
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "trace").symlink_to(tmp_path / "trace")
    with hpc3d.trace.open(merge(tmp_path / "alone")) as trace:
        after = rows(trace, *SAME, "t_start")
    with opened(tmp_path) as trace:
        found = rows(trace, *SAME, "t_start")
        assert violations(trace) == []
        assert trace.attrs["complete"], trace.attrs["missing"]
        assert all(steps_of(trace, rank) == [*range(6)] for rank in range(RANKS))
        assert {*trace.memory["step"].tolist()} == {*range(6)}
        assert trace.attrs["segments"] == RANKS
        evaluated = [trace.evaluation[name].tolist() for name in ("step", "loss")]
        assert evaluated == [[*range(6)], [0.5, 0.5, 2.5, 2.5, 2.5, 2.5]]
        assert trace.validation["step"].tolist() == [*np.repeat(range(6), 2)]
        assert trace.validation["text"].tolist() == [0, 1] * 6
        assert trace.validation["loss"].tolist() == [0.25, 0.75] * 2 + [2.25, 2.75] * 4
    for (rank, step), values in found.items():
        if step >= 0:
            assert values == (before if step < 2 else after)[rank, step], (rank, step)
    # Behind steps 0 and 1 of the first attempt, and those of the second.
    assert found[0, -1] == before[0, -1][:2] + after[0, -1]


def test_merged_attempts_keep_every_value_and_parent(tmp_path):
    small.write_all(tmp_path)
    merge(tmp_path)
    (tmp_path / "config.toml").touch()
    set_aside(tmp_path, 1)
    for rank in range(small.RANKS):
        small.write(tmp_path, rank, 2)
        segment_path(tmp_path, rank, 2).rename(segment_path(tmp_path, rank, 0))
    parts = product(range(small.RANKS), range(3))
    expected = [row for part in parts for row in small.rows_of(*part)]
    expected.sort(key=lambda row: (row["rank"], row["t_start"]))
    for row in expected:
        row["seq"] += small.ROWS * (row["step"] == 2)
    with hpc3d.trace.open(merge(tmp_path)) as trace:
        events = trace.events.columns()
        names = [trace.strings[number] for number in events["name"]]
    assert names == [row["name"] for row in expected]
    for name in events.keys() - {"name", "group", "parent"}:
        assert events[name].tolist() == [row[name] for row in expected], name
    for row, parent in zip(expected, events["parent"].tolist(), strict=True):
        child = row["count"] % small.ROWS == 2
        assert parent == -1 if not child else events["count"][parent] == row["count"] + 3


def test_dropped_events_of_all_attempts_are_summed(tmp_path):
    """Each segment has the number of dropped events of its attempt so far: 5; and 2, then 3."""
    for number in range(small.SEGMENTS):
        for rank in range(small.RANKS):
            small.write(tmp_path, rank, number, {"dropped": 5})
    merge(tmp_path)
    (tmp_path / "config.toml").touch()
    set_aside(tmp_path, 1)
    for rank, number in product(range(small.RANKS), (0, 1)):
        small.write(tmp_path, rank, 2 + number, {"dropped": 2 + number})
        segment_path(tmp_path, rank, 2 + number).rename(segment_path(tmp_path, rank, number))
    with hpc3d.trace.open(merge(tmp_path)) as trace:
        lines = trace.attrs["missing"].splitlines()
    assert [line[:16] for line in lines] == [
        f"rank {rank}: 8 events" for rank in range(small.RANKS)
    ]


def test_call_numbers_continue_across_attempts(tmp_path):
    attempt(tmp_path, 0, 2)
    attempt(tmp_path, 2, 4)
    attempt(tmp_path, 3, 5)
    with opened(tmp_path) as trace:
        numbered = trace.events["seq"] >= 0
        steps, numbers = (trace.events[name][numbered] for name in ("step", "seq"))
        ends = [(numbers[steps == step].min(), numbers[steps == step].max()) for step in range(5)]
        assert violations(trace) == []
        assert steps_of(trace) == [*range(5)]
    # attempts do not share numbers
    assert ends[1][1] < ends[2][0] and ends[2][1] < ends[3][0]


@pytest.mark.slow
def test_restarted_clock_is_shifted_by_wall_time(tmp_path):
    origin = SOME()
    attempt(tmp_path, 0, 3, created=5)
    attempt(tmp_path, 3, 5, created=45, clock=clock_from(0))
    with opened(tmp_path) as trace:
        mine = trace.steps["rank"] == 0
        start = trace.steps["t_start"][mine]
        assert violations(trace) == []
        for name in ("t_start", "t_global", "posted"):
            assert (trace.events[name][trace.events["step"] > 2] > origin).all()
        assert steps_of(trace) == [*range(5)]
        assert trace.attrs["created_utc"] == CREATED.format(5)
    # Each attempt reads the clock a few times before its first step.
    assert start[3] - start[0] == pytest.approx(40e9, abs=20_000)


@pytest.mark.slow
def test_attempt_with_an_unknown_time_is_placed_later(tmp_path):
    attempt(tmp_path, 0, 3, created=5)
    attempt(tmp_path, 3, 5, created=5, clock=clock_from(0))
    with opened(tmp_path) as trace:
        assert violations(trace) == []


def test_attempt_with_another_layout_is_omitted_and_reported(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)]
    (tmp_path / metrics_file.NAME).write_text("".join(lines))
    attempt(tmp_path, 0, 3)
    attempt(tmp_path, 2, 5, layout=FLAT)
    with opened(tmp_path) as trace:
        assert steps_of(trace) == [2, 3, 4]
        assert trace.attrs["missing"] == "" and trace.attrs["complete"]
        assert trace.attrs["other_layout"] == "trace-1.h5, steps before 2"
        assert violations(trace) == []
    attempt(tmp_path, 2, 5)  # all of the second attempt is undone: the first one is gone on with
    with opened(tmp_path) as trace:
        assert steps_of(trace) == [*range(5)] and trace.attrs["complete"]
        assert trace.attrs["other_layout"] == ""
        assert violations(trace) == []


def test_another_layout_is_reported_by_all_later_attempts(tmp_path):
    """Attempts 2 and 3 have the same layout, so the trace contains the steps of both. The events
    of step 3 were lost when the first attempt was killed."""
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(6)]
    (tmp_path / metrics_file.NAME).write_text("".join(lines))
    attempt(tmp_path, 0, 3)
    attempt(tmp_path, 4, 6, layout=FLAT)
    attempt(tmp_path, 5, 6, layout=FLAT)
    with opened(tmp_path) as trace:
        assert steps_of(trace) == [4, 5] and not trace.attrs["complete"]
        assert trace.attrs["missing"] == "step 3: trained, but not in any segment of the trace"
        assert trace.attrs["other_layout"] == "trace-1.h5, steps before 4"


def test_later_error_is_not_mistaken_for_damage(tmp_path, monkeypatch):
    attempt(tmp_path, 0, 2)
    attempt(tmp_path, 2, 4)
    monkeypatch.setattr(merging, "supplements", lambda *_: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        merge(tmp_path)


def rubbish(path):
    path.write_bytes(b"rubbish")


def flip(path):
    """Flip a bit in a column, which only its checksum detects."""
    with h5py.File(path) as file:
        place = file["events/dur"].id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[place + 30] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [rubbish, flip])
def test_damaged_previous_trace_is_named(tmp_path, damage):
    attempt(tmp_path, 0, 2)
    attempt(tmp_path, 2, 4)
    damage(tmp_path / "trace-1.h5")
    with hpc3d.trace.open(merge(tmp_path)) as trace:
        assert steps_of(trace) == [2, 3]
        assert trace.attrs["missing"].startswith("steps before 2: ")
        assert "trace-1.h5" in trace.attrs["missing"]


def test_rank_without_new_segments_keeps_its_previous_rows(tmp_path):
    attempt(tmp_path, 0, 2)
    attempt(tmp_path, 2, 4, run_id="renamed")
    segment_path(tmp_path, 0, 0).unlink()
    with hpc3d.trace.open(merge(tmp_path)) as trace:
        assert [steps_of(trace, rank) for rank in range(RANKS)] == [[0, 1], [*range(4)]]
        assert re.fullmatch("rank 0: .* after step 1", trace.attrs["missing"])
        assert trace.attrs["run_id"] == "renamed"
        assert violations(trace) == []
        assert np.unique(trace.events["rank"]).tolist() == [*range(RANKS)]
