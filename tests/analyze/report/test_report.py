"""The command `report`: its options, its error messages and its output."""

import os
import re
import subprocess
import sys

import pytest

from hpc3d import report
from hpc3d.trace.merge import merge
from hpc3d.trace.segment import segment_path
from tests.analyze.report.by_hand import CUT_OFF, WITHOUT_RANK_1, reported, write_run
from tests.runs import without_progress

PEAKS = ("-5", "nan", "0", "inf", "fast")


@pytest.mark.slow
def test_trace_is_merged_only_if_stale_or_requested(run, capsys):
    reported(capsys, run)
    segment_path(run, 1, 0).unlink()
    assert reported(capsys, run / "trace.h5")["runs"][0]["missing"] == CUT_OFF
    assert reported(capsys, run)["runs"][0]["missing"] == CUT_OFF
    assert reported(capsys, run, "--merge")["runs"][0]["missing"] == WITHOUT_RANK_1


def test_run_labels_are_distinct(run, tmp_path, capsys):
    twin = write_run(tmp_path / "twin")
    unnamed = write_run(tmp_path / "unnamed", scheme=None)
    rows = reported(capsys, run, twin, unnamed)["comparison"]
    labels = [f"3d (shards only m and n), x=2 y=2, {name}" for name in ("small", "twin")]
    labels.append("unnamed, x=2 y=2")
    assert [row["run"] for row in rows] == labels


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["absent"], "absent: no such file"),
        ([""], "not a run folder; specify one"),
        (["."], "not a run folder; specify one"),
        (["silent"], "silent: no trace was recorded; set trace.enabled = true"),
        (["killed"], "killed: no trace yet; segments are written after 30 s"),
        (["whole/trace"], "whole/trace: a folder of trace segments; specify its parent"),
        (["merged", "--merge"], "merged: no segments to merge; omit --merge"),
        (["trace.h5", "--merge"], "--merge requires a run folder"),
        (["text"], "text: not an HDF5 file; specify a run folder or its trace.h5"),
        (["whole/trace/rank-00000-0000.npz"], "not an HDF5 file"),
        (["whole", "--out", "text"], r"text: cannot write there \(File exists\); .*--out"),
        (["whole", "--steps", "a"], "--steps: a: must be a step or range"),
        (["whole", "--export", "x"], "--export: x: must be one of perfetto"),
        (["whole", "--figures", "svg,jpg"], "--figures: jpg: must be one of svg, pdf"),
        (["whole", "--figures", ""], "--figures: '': must be one of svg, pdf, png"),
        (["whole", "--figures", "svg", "--tables"], "--figures cannot be combined with --tables"),
        (["whole", "--width", "84mm"], "--width is the width of figure files; add --figures"),
        (["whole", "--only", "loss"], "--only selects figure files; add --figures pdf"),
        (["whole", "--figures", "svg", "--only", "los"], "--only: los: must be one of loss, runs"),
        *(
            (["whole", "--figures", "svg", "--width", width], f"--width: {width}: must be a width")
            for width in ("84", "1mm", "9999mm", "nanmm", "wide")
        ),
        *(
            (["whole", f"--peak={peak}"], f"--peak: {peak}: must be a positive rate")
            for peak in PEAKS
        ),
    ],
)
@pytest.mark.slow
def test_invalid_input_is_one_line_and_exits_with_2(
    tmp_path, monkeypatch, capsys, arguments, reason
):
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
    """Return the exit code of the command."""
    try:
        return report.main(arguments)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_report_prints_to_a_terminal_with_a_limited_encoding(run, encoding):
    name = "x \u00fc \u4e2d"
    run = run.rename(run.with_name(name))
    done = printed(run, stdout=subprocess.PIPE, encoding=encoding)
    assert (done.returncode, without_progress(done.stderr.decode())) == (0, "")
    assert f"written to {run}".encode(encoding, "backslashreplace") in done.stdout


@pytest.mark.slow
def test_closed_output_pipe_is_no_error(run):
    reader, writer = os.pipe()
    os.close(reader)
    done = printed(run, stdout=writer)
    os.close(writer)
    assert (done.returncode, without_progress(done.stderr.decode())) == (0, "")
    assert (run / "report" / "report.md").exists()


def printed(run, stdout, encoding="utf-8"):
    """Return the output of the command in its own process."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "hpc3d.report", str(run), "--tables"]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=250, check=False
    )


def test_runs_with_the_same_name_get_two_labels(run, tmp_path, capsys):
    rows = reported(capsys, run, write_run(tmp_path / "other" / run.name))["comparison"]
    first, second = (row["run"] for row in rows)
    label = "3d (shards only m and n), x=2 y=2, small"
    assert (first, second) == (f"{label}, 1", f"{label}, 2")


def test_run_given_twice_is_rejected(run, capsys):
    merge(run)
    assert code_of([*map(str, (run, run / "trace.h5", run))]) == 2
    path, line = run / "trace.h5", "this run was given twice; name it only once"
    assert capsys.readouterr().err.splitlines() == [
        f"hpc3d.report: {each}: {line}" for each in (path, run)
    ]


def test_comparisons_replace_neither_the_report_of_a_run_nor_each_other(run, tmp_path, capsys):
    twin, third, other = (write_run(tmp_path / name) for name in ("twin", "third", "a/twin"))
    chosen = [run], [run, twin], [run, other], [run, twin, third], [run, third, twin]
    outs = [reported(capsys, *runs)["out"] for runs in chosen]
    assert outs[0] == str(run / "report")
    assert all(out.startswith(f"{run}/comparison-") for out in outs[1:])
    assert outs[1].rpartition("-")[0].endswith("comparison-twin")
    assert len({*outs}) == len(chosen)
    assert all((run / out / "report.md").is_file() for out in outs)
    assert reported(capsys, *chosen[1])["out"] == outs[1]
