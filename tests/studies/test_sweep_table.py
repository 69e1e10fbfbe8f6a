"""Tables of a sweep: means and confidence intervals over seeds and repetitions, and files."""

import csv

import h5py
import numpy as np
import pytest

from hpc3d.config.argument_types import FIGURES
from hpc3d.studies.sweep_table import summarized, write

GROUPS = {"model.hidden": [64, 128], "layouts": ["50% $d$", "a", "b"]}
AXES = {"seed": [1, 2, 3]} | GROUPS


def row(hidden, seed, repetition, **measures):
    head = {"model.hidden": hidden, "layouts": "50% $d$", "seed": seed, "repetition": repetition}
    return head | {"validation_loss": None, "step_s": 0.01, "received_bytes": 8e6} | measures


def test_samples_are_the_means_of_the_seeds():
    """Repetitions with the same seed do not narrow the interval."""
    losses = [5.0, 5.3, 5.1]
    rows = [
        row(64, seed, repetition, loss=loss, step_s=0.01 * seed + 0.001 * repetition)
        for seed, loss in enumerate(losses, 1)
        for repetition in (-1, 1)
    ]
    (found,) = summarized(rows, GROUPS)
    assert found["runs"] == 6 and "seed" not in found
    assert found["loss"] == pytest.approx(np.mean(losses))
    # The 97.5 % quantile of Student's t distribution with 2 degrees of freedom is 4.303.
    assert found["loss_ci95"] == pytest.approx(4.303 * np.std(losses, ddof=1) / 3**0.5)
    assert found["step_s_ci95"] == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert (found["received_bytes"], found["received_bytes_ci95"]) == (8e6, 0)
    rates = [each | {"tokens_per_s": 512 / each["step_s"]} for each in rows]
    (found,) = summarized(rates, GROUPS)
    assert found["tokens_per_s"] == pytest.approx(512 / found["step_s"])
    assert found["tokens_per_s_ci95"] / found["tokens_per_s"] == pytest.approx(
        found["step_s_ci95"] / found["step_s"]
    )
    assert (found["validation_loss"], found["validation_loss_ci95"]) == (None, None)


def test_repetitions_of_one_seed_are_samples_of_times_but_not_of_losses():
    """Two samples of a time are too few for a useful interval."""
    times = enumerate((0.1, 0.2, 0.3))
    rows = [row(64, 1, number, loss=5.0, step_s=time) for number, time in times]
    (found,) = summarized(rows, GROUPS)
    assert (found["loss"], found["loss_ci95"]) == (5.0, None)
    assert found["step_s_ci95"] == pytest.approx(4.303 * 0.1 / 3**0.5)
    (found,) = summarized(rows[:2], GROUPS)
    assert (found["step_s"], found["step_s_ci95"]) == (pytest.approx(0.15), None)


def test_rows_have_the_order_of_the_axes_if_a_point_is_unfinished():
    rows = [
        row(hidden, seed, 0, loss=5.0) | {"layouts": name}
        for seed in (1, 2)
        for name in "ab"
        for hidden in (64, 128)
    ]
    complete, without = (summarized(each, GROUPS) for each in (rows, rows[1:]))
    order = [
        [(each["model.hidden"], each["layouts"]) for each in found]
        for found in (complete, without)
    ]
    assert order[0] == order[1] == [(64, "a"), (64, "b"), (128, "a"), (128, "b")]
    assert [each["runs"] for each in without] == [1, 2, 2, 2]


def test_files_have_the_values_and_the_summary_is_formatted(tmp_path):
    rows = [
        row(hidden, seed, 0, loss=loss)
        for hidden in (64, 128)
        for seed, loss in ((1, 5.0), (2, 5.2))
    ]
    text = write(rows, AXES, tmp_path)
    assert "no figure" not in text
    line = "|     64 | 50% $d$ |    2 | 5.1 ± 1.3 |           10.0 |          8.00 |"
    assert text.splitlines()[2] == line
    assert r"64 & 50\% \$d\$ & 2 & 5.1 ± 1.3 & 10.0 & 8.00 \\" in (
        (tmp_path / "summary.tex").read_text()
    )
    with (tmp_path / "summary.csv").open() as file:
        summary = [*csv.DictReader(file)]
    assert [each["model.hidden"] for each in summary] == ["64", "128"]
    assert float(summary[0]["loss_ci95"]) == pytest.approx(12.706 * 0.1)
    with (tmp_path / "runs.csv").open() as file, h5py.File(tmp_path / "runs.h5") as table:
        runs = [*csv.DictReader(file)]
        assert [*runs[0]] == [*row(1, 1, 0, loss=1)] and {*table} == {*runs[0]}
        assert table["loss"][:].tolist() == [float(each["loss"]) for each in runs]
        assert table["layouts"].asstr()[0] == "50% $d$"
        assert np.isnan(table["validation_loss"][:]).all()
    assert {path.suffix for path in tmp_path.glob("summary.*")} == {
        *(".csv", ".md", ".tex", ".png", ".svg", ".pdf")
    }


def test_each_validation_text_has_a_column(tmp_path):
    losses = {1: (4.0, 6.0), 2: (4.2, 6.4)}
    rows = [
        row(64, seed, 0, loss=5.0, **{"validation_loss/a": one, "validation_loss/b": two})
        for seed, (one, two) in losses.items()
    ]
    text = write(rows, AXES, tmp_path)
    assert "| validation loss a | validation loss b |" in text.splitlines()[0]
    assert "|         4.1 ± 1.3 |         6.2 ± 2.5 |" in text.splitlines()[2]
    with h5py.File(tmp_path / "runs.h5") as table:
        assert table["validation_loss_b"][:].tolist() == [6.0, 6.4]


def test_only_the_markdown_file_has_escaped_lists(tmp_path):
    rows = [row(64, 1, 0, loss=5.0) | {"data.weights": weights} for weights in ("[2, 1]", "[1]")]
    assert "| [2, 1]  |" in write(rows, {"data.weights": ["[2, 1]", "[1]"]}, tmp_path)
    assert r"| \[2, 1\] |" in (tmp_path / "summary.md").read_text()


def drawn(monkeypatch, rows, axes, folder):
    """Return the figure of a sweep."""
    figures = []
    monkeypatch.setattr(
        "hpc3d.studies.sweep_table.save",
        lambda figure, *_: figures.append(figure) or figure.draw_without_rendering(),
    )
    write(rows, axes, folder)
    return figures[0]


def test_legend_names_the_keys_of_numbers_and_lists(tmp_path, monkeypatch):
    axes = {"model.hidden": [64, 128], "machine": ["h100", "v100"], "train.batch": [4, 8]}
    axes |= {"data.weights": ["[1, 1]", "[5, 1]"]}
    rows = [
        row(hidden, 1, 0, loss=5.0) | dict(zip([*axes][1:], values))
        for hidden in (64, 128)
        for values in (("h100", 4, "[1, 1]"), ("v100", 8, "[5, 1]"))
    ]
    (legend,) = drawn(monkeypatch, rows, axes, tmp_path).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "h100, batch=4, weights=[1, 1]",
        "v100, batch=8, weights=[5, 1]",
    ]


def test_error_bars_of_two_lines_are_drawn_side_by_side(tmp_path, monkeypatch):
    rows = [
        row(hidden, seed, 0, loss=5.0 + seed) | {"layouts": name}
        for hidden in (64, 128)
        for seed in (1, 2)
        for name in "ab"
    ]
    figure = drawn(monkeypatch, rows, AXES, tmp_path)
    parts = [line.get_children() for line in figure.axes[0].containers]
    for one, two in zip(*parts, strict=True):
        (left, _), (right, _) = (each.get_transform().transform((64, 5)) for each in (one, two))
        assert 3 < right - left < 15  # pixels
    (legend,), panels = figure.legends, figure.axes
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert all(legend.get_window_extent().ymin >= panel.bbox.ymax for panel in panels)


def test_figure_has_the_chosen_formats_and_width(tmp_path):
    rows = [row(hidden, 1, 0, loss=5.0) for hidden in (64, 128)]
    for formats, width in ((["png"], None), (["svg"], 84 / 25.4)):
        write(rows, AXES, tmp_path, formats, width)
        assert {*FIGURES} & {path.suffix[1:] for path in tmp_path.iterdir()} == {*formats}
    assert 'width="238.11' in (tmp_path / "summary.svg").read_text(encoding="utf-8")  # 84 mm


def test_number_of_ranks_has_a_column_if_it_varies(tmp_path):
    rows = [
        row(64, 1, 0, loss=5.0) | {"layouts": name, "ranks": ranks}
        for name, ranks in (("a", 2), ("b", 4))
    ]
    axes = {"layouts": ["a", "b"]}
    lines = write(rows, axes, tmp_path).splitlines()
    assert [line[:26] for line in (lines[0], *lines[2:4])] == [
        "| layouts | ranks | runs |",
        "| a       |     2 |    1 |",
        "| b       |     4 |    1 |",
    ]
    assert "ranks" not in write(rows[:1], axes, tmp_path)
    assert write(rows, axes | {"ranks": [2, 4]}, tmp_path).splitlines()[0].count("ranks") == 1


def test_axes_without_numbers_have_no_figure(tmp_path):
    rows = [row(64, seed, 0, loss=5.0) | {"layouts": name} for seed in (1, 2) for name in "ab"]
    text = write(rows, AXES, tmp_path)
    assert text.splitlines()[-1].startswith("no figure: the finished points have one value of")
    assert (tmp_path / "summary.csv").exists() and not (tmp_path / "summary.png").exists()
