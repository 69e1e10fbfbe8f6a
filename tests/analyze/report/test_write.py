"""Files that a report writes, and files that it does not change."""

import csv
import inspect
import re

import pytest

from hpc3d import report
from hpc3d.analyze.report import figure_list
from tests.analyze.report.by_hand import reported, write_run

LABEL = "3d (shards only m and n), x=2 y=2"


def test_tables_are_printed_and_written(run, capsys):
    assert report.main([str(run), "--tables", "--print"]) == 0
    printed = capsys.readouterr().out
    text = (run / "report" / "report.md").read_text()
    for line in (
        f"| {LABEL} |     4 |     2 |      1.55 |        1.80 |      2.05 |   1.00 M |",
        "| compute    | backward |      | gemm           |     0.400 | 24.2% |   2.0 |",
    ):
        assert line in printed and line in text
    assert "Pipeline" not in text
    with (run / "report" / "tables" / "time.csv").open(newline="") as file:
        rows = {(row["category"], row["axis"]): row for row in csv.DictReader(file)}
    assert rows["comm", "x"]["run"] == LABEL
    assert float(rows["comm", "x"]["bytes"]) == 4000.0
    assert {path.name for path in (run / "report").iterdir()} == {"report.md", "tables"}


@pytest.mark.slow
def test_new_report_replaces_an_older_one(run, tmp_path, capsys):
    out = tmp_path / "out"
    words = [str(run), "--out", str(out), "--export", "pipit", "--figures", "svg,pdf"]
    assert report.main([*words, "--width", "84mm"]) == 0
    (out / "mine.txt").write_text("mine")
    assert {path.name for path in out.iterdir()} > {"figures", "report.html", "exports"}
    assert {path.suffix for path in (out / "figures").iterdir()} == {".svg", ".pdf"}
    assert 'width="238.11' in (out / "figures" / "ranks.svg").read_text(encoding="utf-8")  # 84 mm
    assert "](figures/ranks.svg)" in (out / "report.md").read_text(encoding="utf-8")
    reported(capsys, run, "--out", out)
    assert {path.name for path in out.iterdir()} == {"mine.txt", "report.md", "tables"}


def test_report_keeps_unrelated_files_in_its_folder(run, tmp_path, capsys):
    (tmp_path / "out" / "figures").mkdir(parents=True)
    reported(capsys, run, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "figures").is_dir()


def test_page_is_written_before_the_figure_files(run, monkeypatch):
    def fail(*given):
        raise OSError("no space left")

    monkeypatch.setattr("hpc3d.analyze.report.plot_matplotlib.save", fail)
    assert report.main([str(run), "--figures", "pdf"]) == 2
    assert (run / "report" / "report.html").stat().st_size > 1e5


def test_only_the_chosen_figures_are_drawn(run, tmp_path, capsys):
    runs = [str(run), str(write_run(tmp_path / "flat", scheme="1d"))]
    words = ["--figures", "svg", "--out", str(tmp_path / "out"), "--only"]
    assert report.main([*runs, *words, "runs,traffic"]) == 0
    names = [f"traffic{axis}-{number}.svg" for axis in ("", "-x", "-y") for number in (1, 2)]
    drawn = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert drawn == {"runs.svg", *names}
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert text.count("](figures/") == len(drawn)
    assert report.main([*runs, *words, "runs,speedup"]) == 2
    assert "--only speedup: these runs have no such figure" in capsys.readouterr().err
    assert "figures/runs.svg" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_names_of_all_figures_are_options():
    calls = []
    for source in (figure_list.of_runs, figure_list.of_run, figure_list._step_times):
        calls += re.findall(r'Picture\(f?"(\w+)', inspect.getsource(source))
    assert sorted(calls) == sorted(figure_list.NAMES)
