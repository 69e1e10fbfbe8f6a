"""The report of small runs against numbers worked out by hand."""

import csv
import json
import os
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest

from hpc3d import report
from hpc3d.trace import schema
from hpc3d.trace.merge import merge
from hpc3d.trace.segment import segment_path, write_segment
from tests.analyze.small import small
from tests.analyze.synthetic import call

US = 1000  # ns
MS = 1000 * US
NAN = float("nan")
PEAKS = ("-5", "nan", "0", "inf", "fast")

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

    The reduce-scatter is in step 2 only, and what warms up in step 0.
    """
    events = [
        event(HOST, FORWARD, 0, 0, 600),
        event(COMPUTE, FORWARD, GEMM, 10, 300, flops=6e5, parent=0),
        event(COMM, FORWARD, GATHER, 400, 100 + 10 * rank, bytes=4000, parent=0, **meets(0, step)),
        event(COMPUTE, BACKWARD, GEMM, 610, 200, flops=4e5),
        event(COMPUTE, BACKWARD, GEMM, 810, 200, flops=4e5),
        event(WAIT, BACKWARD, SCATTER, 1010, 20, group=1),
    ]
    if step == 0:
        events.append(event(COMPUTE, BACKWARD, GEMM, 2000, 6000, flops=1e9))
    if step == 2:
        events.append(event(COMM, BACKWARD, SCATTER, 1040, 50, bytes=1000, **meets(1, 0)))
    return [{**row, "step": step, "t_start": row["t_start"] + 10 * step * MS} for row in events]


def uncounted(rank):
    """Before the first step, and in the step that was cut off."""
    rest = {"bytes": 77777, "flops": 1e9}
    return [
        event(COMPUTE, FORWARD, GEMM, -20000, 9000, step=-1, **rest),
        event(COMM, FORWARD, GATHER, 30000, 9000, step=3, **meets(0, 3), **rest),
    ]


def steps_of(rank, losses):
    """Steps of 9, 1 and 2 ms and 0.1 ms more a rank; only the last rank knows the loss."""
    return [
        {
            "step": step,
            "t_start": 10 * step * MS,
            "t_end": 10 * step * MS + (step or 9) * MS + rank * 100 * US,
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


def write_run(run, scheme="3d", losses=(4.0, 3.5, 3.25)):
    for rank in range(4):
        events = uncounted(rank)
        for step in range(3):
            shift = len(events)
            events += [
                {**row, "parent": row["parent"] + shift * (row["parent"] >= 0)}
                for row in events_of(rank, step)
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
                "first": 1,
                "last": 2,
                "step_s_min": 1.3e-3,
                "step_s_25": 1.55e-3,
                "step_s_median": 1.8e-3,
                "step_s_75": 2.05e-3,
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
    assert [row["loss"] for row in result["loss"]] == [4.0, 3.5, 3.25]
    assert result["about"]["averages"] == (
        "over steps 1 to 2; step 0, the first one, warms up and is left out"
    )


def test_a_run_of_one_step_has_no_other(tmp_path, capsys):
    (result,) = reported(capsys, write_run(tmp_path / "one", losses=(4.0,)))["runs"]
    (step,) = result["step"]
    assert (step["steps"], step["first"], step["last"]) == (1, 0, 0)
    assert step["step_s_median"] == pytest.approx(9.3e-3)
    assert result["about"]["averages"] == (
        "of step 0 alone, the first one, which warms up; train for more steps"
    )


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
        "| 3d along m n, x=2 y=2 |     4 |     2 |      1.55 |      1.80 |      2.05 |      1 M |",
        "| compute    | backward |      | gemm           |      0.40 | 24.2% |   2.0 |",
    ):
        assert line in printed and line in text
    assert "Pipeline" not in text
    with (run / "report" / "tables" / "time.csv").open(newline="") as file:
        rows = {(row["category"], row["axis"]): row for row in csv.DictReader(file)}
    assert rows["comm", "x"]["run"] == "3d along m n, x=2 y=2"
    assert float(rows["comm", "x"]["bytes"]) == 4000.0
    assert {path.name for path in (run / "report").iterdir()} == {"report.md", "tables"}


# Its four gathers along x with rank 3, and its reduce-scatter along y with rank 0.
CUT_OFF = [f"rank {rank}: the end of step 3" for rank in range(4)]
WITHOUT_RANK_1 = [
    CUT_OFF[0],
    "rank 1: no segment",
    *CUT_OFF[2:],
    "5 collectives and messages: the call of a member, so their waits may be longer",
]


def test_what_is_missing_is_said(run, capsys):
    segment_path(run, 1, 0).unlink()
    assert reported(capsys, run)["runs"][0]["missing"] == WITHOUT_RANK_1
    assert "* rank 1: no segment" in (run / "report" / "report.md").read_text()


def test_merged_only_when_needed_or_told(run, capsys):
    reported(capsys, run)
    segment_path(run, 1, 0).unlink()
    assert reported(capsys, run / "trace.h5")["runs"][0]["missing"] == CUT_OFF
    assert reported(capsys, run)["runs"][0]["missing"] == CUT_OFF
    assert reported(capsys, run, "--merge")["runs"][0]["missing"] == WITHOUT_RANK_1


def test_losses_are_compared_in_the_same_step(run, tmp_path, capsys):
    """Step 2 is the last that both have."""
    longer = write_run(tmp_path / "longer", scheme="1d", losses=(4.0, 3.5, 3.0, 2.5))
    rows = reported(capsys, run, longer)["comparison"]
    assert [(row["loss_step"], row["loss"]) for row in rows] == [(2, 3.25), (2, 3.0)]


def test_what_is_sent_is_not_received(tmp_path, capsys):
    """A rank sends 7000 bytes to another, which receives them."""
    rows = [
        call(0, "send", 4, 5, seq=0, peer=1, bytes=7000, count=1750, posted=4),
        call(1, "recv", 4, 6, seq=0, peer=0, bytes=7000, posted=4),
    ]
    small(tmp_path / "trace.h5", rows).close()
    (found,) = reported(capsys, tmp_path / "trace.h5")["runs"]
    assert found["step"][0]["communication_bytes"] == 3500
    assert {row["op"]: row["bytes"] for row in found["time"] if row["category"] == "comm"} == {
        "send": 0,
        "recv": 3500,
    }


def test_runs_are_compared(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", scheme="1d", losses=(4.0, 3.5, 3.125))
    out = tmp_path / "comparison"
    found = reported(capsys, run, other, "--out", out)
    first, second = found["comparison"]
    assert (first["run"], second["run"]) == ("3d along m n, x=2 y=2", "1d, x=2 y=2")
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


def test_what_runs_differ_in_is_said_before_they_are_compared(tmp_path, capsys):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", scheme="1d")
    assert reported(capsys, one, other)["notes"] == []
    merge(one), merge(other)
    with h5py.File(other / "trace.h5", "r+") as file:
        file.attrs["config"] += '[train]\nbatch = 96\ndtype = "float64"\n[data]\npath = "mine"\n'
        file.attrs["cores"] = 3
        file["steps/tokens"][:] = 900
    with h5py.File(one / "trace.h5", "r+") as file:
        file.attrs["cores"] = 4
    found = reported(capsys, one, other, "--out", tmp_path / "out")
    three, flat = "3d along m n, x=2 y=2", "1d, x=2 y=2"
    assert found["notes"] == [
        f"train.batch differs: 192 in {three}; 96 in {flat}",
        f"train.dtype differs: float32 in {three}; float64 in {flat}",
        f"tokens a step differs: 1,800 in {three}; 900 in {flat}",
        f"data.path differs: inputs/corpus in {three}; mine in {flat}",
        f"{flat}: cores: 3 for 4 ranks a host: they take turns, so times are longer than on a"
        " core each",
    ]
    assert [row["speedup"] for row in found["scaling"]] == [1, None]
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"Before these runs are compared:\n\n* {found['notes'][0]}\n" in text


def test_labels_tell_runs_apart(run, tmp_path, capsys):
    twin = write_run(tmp_path / "twin")
    unnamed = write_run(tmp_path / "unnamed", scheme=None)
    rows = reported(capsys, run, twin, unnamed)["comparison"]
    labels = [f"3d along m n, x=2 y=2, {name}" for name in ("small", "twin")]
    labels.append("unnamed, x=2 y=2")
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
        ([""], "not the folder of a run; give one"),
        (["."], "not the folder of a run; give one"),
        (["silent"], "silent: no trace; set enabled = true"),
        (["killed"], "killed: no trace yet; the first segments come after 30 s"),
        (["whole/trace"], "whole/trace: the segments of a run; give the folder that it lies in"),
        (["merged", "--merge"], "merged: no segments to be merged; leave --merge out"),
        (["trace.h5", "--merge"], "--merge wants the folder of a run"),
        (["text"], "text: not a file in HDF5; give a run folder or its trace.h5"),
        (["whole/trace/rank-00000-0000.npz"], "not a file in HDF5"),
        (["whole", "--out", "text"], r"text: cannot write there \(File exists\); .*--out"),
        (["whole", "--steps", "a"], "--steps: a: give FIRST:LAST"),
        (["whole", "--export", "x"], "--export: x: not one of perfetto"),
        *((["whole", f"--peak={peak}"], f"--peak: {peak}: give FLOP/s") for peak in PEAKS),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, reason):
    (tmp_path / "text").write_text("no trace")
    write_run(tmp_path / "whole")
    for name, enabled in (("silent", "false"), ("killed", "true")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[trace]\nenabled = {enabled}\n")
    (tmp_path / "merged").mkdir()
    merge(tmp_path / "whole").rename(tmp_path / "merged" / "trace.h5")
    monkeypatch.chdir(tmp_path)
    assert code_of(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpc3d.report: ")
    assert re.search(reason, line)


def code_of(arguments):
    """The exit code of the command."""
    try:
        return report.main(arguments)
    except SystemExit as end:
        return end.code


def test_what_ranks_have_written_since_is_reported(run, capsys):
    """Also where something was put into the file after they wrote it."""
    late = segment_path(run, 3, 0)
    late.rename(run / "late")
    assert "rank 3: no segment" in reported(capsys, run)["runs"][0]["missing"]
    (run / "late").rename(late)
    (run / "trace.h5").touch()
    assert reported(capsys, run)["runs"][0]["missing"] == CUT_OFF
    before = (run / "trace.h5").stat().st_mtime_ns
    reported(capsys, run)
    assert (run / "trace.h5").stat().st_mtime_ns == before, "merged again for nothing"


@pytest.mark.slow
def test_a_report_takes_the_place_of_another_one(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert report.main([str(run), "--out", str(out), "--export", "pipit"]) == 0
    (out / "mine.txt").write_text("mine")
    assert {path.name for path in out.iterdir()} > {"figures", "report.html", "exports"}
    reported(capsys, run, "--out", out)
    assert {path.name for path in out.iterdir()} == {"mine.txt", "report.md", "tables"}


def test_a_folder_without_a_report_keeps_what_it_has(run, tmp_path, capsys):
    (tmp_path / "out" / "figures").mkdir(parents=True)
    reported(capsys, run, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "figures").is_dir()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_few_letters_gets_the_report(run, encoding):
    name = "x \u00fc \u4e2d"
    run = run.rename(run.with_name(name))
    done = printed(run, stdout=subprocess.PIPE, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"written to {run}".encode(encoding, "backslashreplace") in done.stdout


def test_a_reader_that_goes_is_no_error(run):
    reader, writer = os.pipe()
    os.close(reader)
    done = printed(run, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (run / "report" / "report.md").exists()


def printed(run, stdout, encoding="utf-8"):
    """The command as a program."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "hpc3d.report", str(run), "--tables"]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=120, check=False
    )


def test_one_run_twice_has_two_labels(run, capsys):
    rows = reported(capsys, run, run)["comparison"]
    first, second = (row["run"] for row in rows)
    assert (first, second) == tuple(f"3d along m n, x=2 y=2, small, {n}" for n in (1, 2))
