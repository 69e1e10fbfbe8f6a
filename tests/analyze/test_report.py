"""The report of small runs against numbers worked out by hand."""

import csv
import json
import re

import h5py
import numpy as np
import pytest

from hpc3d import report
from hpc3d.trace import events as schema
from hpc3d.trace.segment import segment_path, write_segment

US = 1000  # ns
MS = 1000 * US
NAN = float("nan")

HOST, COMPUTE, COMM, WAIT = (schema.CATEGORY.index(c) for c in ("host", "compute", "comm", "wait"))
FLOAT = schema.DTYPE.index("float32")
FORWARD, BACKWARD = (schema.PHASE.index(phase) for phase in ("forward", "backward"))
GEMM, GATHER, SCATTER = (schema.OP.index(op) for op in ("gemm", "all_gather", "reduce_scatter"))


def event(category, phase, op, start, dur, **values):
    where = {
        "category": category,
        "phase": phase,
        "op": op,
        "t_start": start * US,
        "dur": dur * US,
    }
    return {"group": -1, "seq": -1, "peer": -1, "parent": -1, **where, **values}


def meets(group, number):
    """That a call is the `number`-th of its group, on blocks of 250 floats."""
    return {"group": group, "seq": number, "count": 250, "dtype": FLOAT}


def events_of(rank, step):
    """0.6 ms of a forward pass with 2 events inside, then the backward pass; 10 ms from 0.

    The reduce-scatter is in step 1 only.
    """
    events = [
        event(HOST, FORWARD, 0, 0, 600),
        event(COMPUTE, FORWARD, GEMM, 10, 300, flops=6e5, parent=0),
        event(COMM, FORWARD, GATHER, 400, 100 + 10 * rank, bytes=4000, parent=0, **meets(0, step)),
        event(COMPUTE, BACKWARD, GEMM, 610, 200, flops=4e5),
        event(COMPUTE, BACKWARD, GEMM, 810, 200, flops=4e5),
        event(WAIT, BACKWARD, SCATTER, 1010, 20, group=1),
    ]
    if step == 1:
        events.append(event(COMM, BACKWARD, SCATTER, 1040, 50, bytes=1000, **meets(1, 0)))
    return [{**row, "step": step, "t_start": row["t_start"] + 10 * step * MS} for row in events]


def uncounted(rank):
    """Before the first step, and in the step that was cut off."""
    rest = {"bytes": 77777, "flops": 1e9}
    return [
        event(COMPUTE, FORWARD, GEMM, -20000, 9000, step=-1, **rest),
        event(COMM, FORWARD, GATHER, 20000, 9000, step=2, **meets(0, 2), **rest),
    ]


def steps_of(rank, losses):
    """Steps of 1 ms and 2 ms and 0.1 ms more a rank; only the last rank knows the loss."""
    return [
        {
            "step": step,
            "t_start": 10 * step * MS,
            "t_end": 10 * step * MS + (step + 1) * MS + rank * 100 * US,
            "tokens": 1800,
            "loss": loss if rank == 3 else NAN,
            "grad_norm": 1.5,
            "forward_s": 0.001 * (rank + 1),
            "backward_s": NAN if rank == 3 else 0.002,
        }
        for step, loss in enumerate(losses)
    ]


def memory_of(rank):
    kinds = {"parameter": 100 + rank, "activation": 5000 - rank}
    return [
        {"kind": schema.MEMORY_KIND.index(kind), "bytes": 1, "peak": peak - 50 * (step == 1)}
        for kind, peak in kinds.items()
        for step in range(2)
    ]


def records(columns, rank, rows):
    table = np.zeros(len(rows), schema.record_type(columns))
    for i, row in enumerate(rows):
        for key, value in row.items():
            table[key][i] = value
    table["rank"] = rank
    if columns is schema.EVENTS:
        table["posted"] = table["t_start"]
    return table


def write_run(run, scheme="3d", losses=(3.5, 3.25)):
    for rank in range(4):
        events = events_of(rank, 0) + uncounted(rank)
        shift = len(events)
        later = events_of(rank, 1)
        events += [
            {**row, "parent": row["parent"] + shift * (row["parent"] >= 0)} for row in later
        ]
        write_segment(
            segment_path(run, rank, 0),
            {
                "rank": rank,
                "world_size": 4,
                "axes": ["p", "x", "y"],
                "axis_sizes": [1, 2, 2],
                "coords": [0, *divmod(rank, 2)],
                "host": "node0",
                "local_rank": rank,
                "device": "cpu",
                "pid": rank,
                "run_id": run.name,
                "created_utc": "2025-01-02T03:04:05Z",
                "time_unit": "ns",
                "config": f'[parallel]\nscheme = "{scheme}"\n' if scheme else "",
                "git": "0123abc",
                "mpi": "Open MPI 5",
                "version": "0.1.0",
                "dropped": 0,
                "groups": [
                    {"axis": "x", "members": [rank % 2, rank % 2 + 2]},
                    {"axis": "y", "members": [rank // 2 * 2, rank // 2 * 2 + 1]},
                ],
            },
            ["event"],
            records(schema.EVENTS, rank, events),
            records(schema.STEPS, rank, steps_of(rank, losses)),
            records(schema.MEMORY, rank, memory_of(rank)),
            records(schema.CLOCK_SAMPLES, rank, []),
        )
    return run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "small")


def reported(capsys, *arguments):
    """The JSON object of the last line."""
    assert report.main([*map(str, arguments), "--json", "--tables"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# category, phase, axis, op: us, calls, bytes, flop, flop/s; means over 4 ranks and 2 steps
TIME = {
    # 600 less 300 of the product and 115 of the gather
    ("host", "forward", "", "none"): (185, 1, 0, 0, 0),
    ("compute", "forward", "", "gemm"): (300, 1, 0, 6e5, 2e9),
    ("compute", "backward", "", "gemm"): (400, 2, 0, 8e5, 2e9),
    # 100, 110, 120, 130
    ("comm", "forward", "x", "all_gather"): (115, 1, 4000, 0, 0),
    ("comm", "backward", "y", "reduce_scatter"): (25, 0.5, 500, 0, 0),
    ("wait", "backward", "y", "reduce_scatter"): (20, 1, 0, 0, 0),
    # the mean step of 1650 less all of the above
    ("unrecorded", "", "", ""): (605, 0, 0, 0, 0),
}


def test_time_by_phase_axis_and_operation(run, capsys):
    rows = reported(capsys, run)["runs"][0]["time"]
    keys = ("category", "phase", "axis", "op")
    assert {tuple(row[key] for key in keys) for row in rows} == TIME.keys()
    for row in rows:
        us, calls, received, flop, rate = TIME[tuple(row[key] for key in keys)]
        assert row["seconds"] == pytest.approx(us * 1e-6)
        assert row["share"] == pytest.approx(us / 1650)
        assert (row["calls"], row["bytes"], row["flop"]) == (calls, received, flop)
        assert row["flop_per_s"] == pytest.approx(rate)


def test_step_memory_and_loss(run, capsys):
    (result,) = reported(capsys, run)["runs"]
    assert result["step"] == [
        pytest.approx(
            {
                "ranks": 4,
                "steps": 2,
                "step_s_min": 1.3e-3,
                "step_s_median": 1.8e-3,
                "step_s_max": 2.3e-3,
                "forward_s": 2.5e-3,
                "backward_s": 2e-3,
                "tokens_per_s": 1e6,
                "communication_share": (115 + 25 + 20) / 1650,
                "communication_calls": 1.5,
                "communication_bytes": 4500,
            }
        )
    ]
    assert result["memory"] == [
        {"kind": "parameter", "peak": 103, "rank": 3},
        {"kind": "activation", "peak": 5000, "rank": 0},
    ]
    assert [row["loss"] for row in result["loss"]] == [3.5, 3.25]


def test_bytes_from_rank_to_rank(run, capsys):
    """4000 B of each gather along x come from the one other member; 1000 B along y in one step."""
    (result,) = reported(capsys, run)["runs"]
    pairs = [(axis, rank, rank ^ bit) for axis, bit in (("x", 2), ("y", 1)) for rank in range(4)]
    assert [tuple(row.values()) for row in result["traffic"]] == [
        (*pair, 4000 if pair[0] == "x" else 500) for pair in pairs
    ]


def test_tables_are_printed_and_written(run, capsys):
    assert report.main([str(run), "--tables"]) == 0
    printed = capsys.readouterr().out
    text = (run / "report" / "report.md").read_text()
    for line in (
        "| 3d, x=2 y=2 |     4 |      1.80 |      1 M |          9.7% |   1.5 |        4.5 k |",
        "| compute    | backward |      | gemm           |      0.40 | 24.2% |   2.0 |",
    ):
        assert line in printed and line in text
    assert "Pipeline" not in text
    with (run / "report" / "tables" / "time.csv").open(newline="") as file:
        rows = {(row["category"], row["axis"]): row for row in csv.DictReader(file)}
    assert rows["comm", "x"]["run"] == "3d, x=2 y=2"
    assert float(rows["comm", "x"]["bytes"]) == 4000.0
    assert {path.name for path in (run / "report").iterdir()} == {"report.md", "tables"}


# Its three gathers along x with rank 3, and its reduce-scatter along y with rank 0.
WITHOUT_RANK_1 = [
    "rank 1: no segment",
    "4 collectives and messages: the call of a member, so their waits may be longer",
]


def test_what_is_missing_is_said(run, capsys):
    segment_path(run, 1, 0).unlink()
    assert reported(capsys, run)["runs"][0]["missing"] == WITHOUT_RANK_1
    assert "* rank 1: no segment" in (run / "report" / "report.md").read_text()


def test_merged_only_when_needed_or_told(run, capsys):
    reported(capsys, run)
    segment_path(run, 1, 0).unlink()
    assert reported(capsys, run / "trace.h5")["runs"][0]["missing"] == []
    assert reported(capsys, run)["runs"][0]["missing"] == []
    assert reported(capsys, run, "--merge")["runs"][0]["missing"] == WITHOUT_RANK_1


def test_runs_are_compared(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", scheme="1d", losses=(3.5, 3.125))
    out = tmp_path / "comparison"
    found = reported(capsys, run, other, "--out", out)
    first, second = found["comparison"]
    assert (first["run"], second["run"]) == ("3d, x=2 y=2", "1d, x=2 y=2")
    assert (first["loss"], first["loss_difference"]) == (3.25, 0)
    assert (second["loss"], second["loss_difference"]) == (3.125, 0.125)
    assert [row["speedup"] for row in found["scaling"]] == [1, 1]
    assert {row["run"] for row in found["differences"]} == {"1d, x=2 y=2"}
    with (out / "tables" / "ranks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"][:2], row["rank"]) for row in rows] == [
        (run, rank) for run in ("3d", "1d") for rank in "0123"
    ]
    assert (out / "tables" / "ranks.tex").read_text().count("1d, x=2 y=2 & ") == 4
    assert not (run / "report").exists()


def test_labels_tell_runs_apart(run, tmp_path, capsys):
    twin = write_run(tmp_path / "twin")
    unnamed = write_run(tmp_path / "unnamed", scheme=None)
    rows = reported(capsys, run, twin, unnamed)["comparison"]
    labels = ["3d, x=2 y=2, small", "3d, x=2 y=2, twin", "unnamed, x=2 y=2"]
    assert [row["run"] for row in rows] == labels


def test_an_index_out_of_its_table_is_refused(run, capsys):
    assert report.main([str(run), "--tables"]) == 0
    with h5py.File(run / "trace.h5", "r+") as file:
        file["events/group"][0] = 4
    assert report.main([str(run), "--tables"]) == 2
    assert "events/group points outside of its table" in capsys.readouterr().err


def test_a_run_without_a_completed_step_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "short", losses=())
    assert report.main([str(run)]) == 2
    assert "no step was completed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["absent"], "absent: no such file"),
        (["."], "no trace; set enabled = true"),
        (["trace.h5", "--merge"], "--merge wants the folder of a run"),
        (["text"], "text: .*merge the run again"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, reason):
    (tmp_path / "text").write_text("no trace")
    monkeypatch.chdir(tmp_path)
    assert report.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpc3d.report: ")
    assert re.search(reason, line)
