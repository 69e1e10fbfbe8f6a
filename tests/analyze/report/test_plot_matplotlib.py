"""Charts drawn by Matplotlib."""

import re

import numpy as np
import pytest
from matplotlib import rc_context

from hpc3d.analyze.metrics.critical_path import critical_path
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.analyze.report import charts, figure_list, plot_bokeh
from hpc3d.analyze.report.charts import Bars, Heat, LoadMaps
from hpc3d.analyze.report.plot_matplotlib import draw, save
from hpc3d.analyze.report.step_timeline import timeline
from tests.analyze.small import small

# What matplotlib says; not what is collected here of other tests, such as their open files.
pytestmark = pytest.mark.filterwarnings("error::UserWarning", "error::DeprecationWarning")
NAN = float("nan")


class Run:
    """The part of a run that a chart of its loss requires."""

    def __init__(self, label, losses, evaluations=()):
        self.label = label
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
        evaluated = [{"step": step, "loss": loss} for step, loss in evaluations]
        self.tables = {"loss": rows, "evaluation": evaluated, "validation": [], "attempts": []}


def test_loss_figure_has_a_line_per_run_and_a_difference_panel():
    runs = [Run("3d", (3.5, 3.25)), Run("1d, $x_2$", (3.5, None)), Run("2d", (3.75, 3.0, 2.0))]
    loss, difference = draw(charts.loss(runs)).axes
    assert [line.get_label() for line in loss.lines] == ["3d", r"1d, \$x_2\$", "2d"]
    for line, values in zip(loss.lines, [(3.5, 3.25), (3.5, NAN), (3.75, 3.0, 2.0)]):
        np.testing.assert_array_equal(line.get_ydata(), values)
    for line, values in zip(difference.lines, [(0, NAN), (0.25, -0.25)], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), values)
    assert loss.lines[2].get_linewidth() < loss.lines[0].get_linewidth()
    assert (loss.get_ylabel(), difference.get_xlabel()) == (
        "loss [nat per token]",
        "training step",
    )


def test_single_run_has_no_difference_panel():
    (axes,) = draw(charts.loss([Run("3d", (3.5, 3.25))])).axes
    assert axes.get_legend().get_texts()[0].get_text() == "training"


def test_evaluation_curve_is_drawn_with_the_training_loss():
    runs = [Run("3d", (3.5, 3.25, 3.0), [(0, 3.75), (2, 3.5)]), Run("1d", (3.5, 3.0))]
    loss, difference = draw(charts.loss(runs)).axes
    assert [line.get_label() for line in loss.lines] == ["3d", "1d", "_", "validation"]
    np.testing.assert_array_equal(loss.lines[2].get_xydata(), [(0, 3.75), (2, 3.5)])
    colors = [line.get_color() for line in loss.lines]
    assert colors[2] == colors[0] != colors[1] and len(difference.lines) == 1
    models = plot_bokeh.draw(charts.loss(runs)).references()
    items = [each.label.value for each in models if type(each).__name__ == "LegendItem"]
    assert sorted(items) == ["1d", "1d", "3d"]  # of both panels


def test_each_validation_text_has_a_curve():
    run = Run("3d", (3.5, 3.25), [(0, 3.75), (1, 3.5)])
    texts = [("a.h5", 0, 4.0), ("b.h5", 0, 3.5), ("a.h5", 1, 3.0), ("b.h5", 1, None)]
    keys = "text", "step", "loss"
    run.tables["validation"] = [dict(zip(keys, each, strict=True)) for each in texts]
    (axes,) = draw(charts.loss([run])).axes
    names = "training", "validation", "validation on a.h5", "validation on b.h5"
    assert tuple(line.get_label() for line in axes.lines) == names
    np.testing.assert_array_equal(axes.lines[2].get_xydata(), [(0, 4.0), (1, 3.0)])
    np.testing.assert_array_equal(axes.lines[3].get_ydata(), (3.5, NAN))


@pytest.mark.parametrize(("longest", "top"), [(59.0, None), (2000.0, 60.0)])
def test_an_outlier_does_not_flatten_the_step_times(longest, top):
    run = Run("3d", (3.5,) * 6)
    for row, seconds in zip(run.tables["loss"], (9.0, 20.0, 20.0, longest, 21.0, 19.0)):
        row |= {"seconds": seconds * 1e-3, "attempt": None}
    chart = charts.step_times(run)
    assert chart.lines["3d"][0] == [1, 2, 3, 4, 5] and chart.top == pytest.approx(top)
    (axes,) = draw(chart).axes
    assert (axes.get_ylim()[1] == pytest.approx(60.0)) == (top is not None)
    if top:
        (picture,) = figure_list._step_times(run)
        assert picture.caption.endswith("the range of the chart: 1 step, at most 2.00 s (step 3).")


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_expert_figure_has_a_map_per_layer(layers, tmp_path):
    values = np.array([[1.0, 3.0], [1.0, 0.0]])
    chart = LoadMaps(np.array([4, 6, 8]), {2 * layer: values for layer in range(layers)})
    figure = draw(chart)
    panels = [panel for panel in figure.axes[:-1] if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == ["layer 0", "layer 2", "layer 4"][:layers]
    for panel in panels:
        (image,) = panel.collections
        np.testing.assert_array_equal(image.get_array(), values)
        assert image.norm(1) == 0.5 and image.norm(3) == 1  # white, and the darkest red
        assert panel.get_ylim() == (1.5, -0.5) and panel.get_xlim() == (3.5, 7.5)
    save(figure, tmp_path / "experts")
    assert (tmp_path / "experts.svg").stat().st_size > 0


def stack(count):
    parts = {"a": ("red", np.arange(count) + 1.0), "b": ("blue", np.full(count, 2.0))}
    return Bars("rank", "time [ms]", [f"r{n}" for n in range(count)], parts)


def test_bars_are_stacked():
    (axes,) = draw(stack(3)).axes
    found = [
        (bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()) for bar in axes.patches
    ]
    np.testing.assert_allclose(
        found, [(0, 0, 1), (1, 0, 2), (2, 0, 3), (0, 1, 2), (1, 2, 2), (2, 3, 2)]
    )
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["r0", "r1", "r2"]


def test_many_bars_are_drawn_as_an_outline():
    (axes,) = draw(stack(200)).axes
    lower, upper = (patch.get_data() for patch in axes.patches)
    np.testing.assert_array_equal(lower.values, np.arange(200) + 1)
    np.testing.assert_array_equal(upper.baseline, lower.values)
    np.testing.assert_array_equal(upper.values, lower.values + 2)
    assert len(axes.get_xticks()) <= 32


def test_horizontal_bars_are_stacked_to_the_right():
    (axes,) = draw(stack(2)._replace(horizontal=True)).axes
    found = [
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in axes.patches
    ]
    np.testing.assert_allclose(found, [(0, 0, 1), (1, 0, 2), (0, 1, 2), (1, 2, 2)])
    assert axes.yaxis_inverted()


def test_traffic_matrix_has_the_sender_on_the_vertical_axis():
    figure = draw(Heat("MB", np.array([[NAN, 2.0], [1.0, NAN]]), ranks=8))
    axes, bar = figure.axes
    (image,) = axes.images
    assert image.get_extent() == [-0.5, 15.5, 15.5, -0.5]
    assert image.get_clim() == (0, 2)
    np.testing.assert_array_equal(image.get_array().filled(0), [[0, 2], [1, 0]])
    assert (axes.get_ylabel(), bar.get_ylabel()) == ("sender [rank]", "MB")


def test_rank_ticks_are_integers():
    figure = draw(Heat("MB", np.array([[NAN, 2.0], [1.0, NAN]]), ranks=1))
    figure.canvas.draw()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        ticks = [tick for tick in axis.get_ticklocs() if -0.5 <= tick <= 1.5]
        assert ticks == [round(tick) for tick in ticks]


def test_timeline_has_a_box_per_segment_of_an_event(tmp_path):
    with small(tmp_path / "trace.h5") as trace:
        calls = calls_of(trace)
        chart = timeline(trace, calls, 0, critical_path(trace, calls, 0))
    (axes,) = draw(chart).axes
    found = {
        boxes.get_label(): sorted(
            (*path.get_extents().min.round(6), *path.get_extents().max.round(6))
            for path in boxes.get_paths()
        )
        for boxes in axes.collections
    }
    assert found["wait"] == [(4, -0.42, 5, 0.42), (6, -0.42, 8, 0.42)]
    assert found["optimizer"] == [(6, 0.58, 8, 1.42)]
    assert sum(map(len, found.values())) == 9
    assert axes.get_xlim() == (0, 10) and axes.yaxis_inverted()


def test_pdf_figure_has_the_width_and_its_fonts(tmp_path):
    figure = draw(charts.loss([Run("3d", (3.5, 3.25))]), 84 / 25.4)
    save(figure, tmp_path / "loss", ["pdf"])
    assert [path.name for path in tmp_path.iterdir()] == ["loss.pdf"]
    data = (tmp_path / "loss.pdf").read_bytes()
    width = float(re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", data)[1])
    assert width == pytest.approx(84 / 25.4 * 72, rel=1e-3)
    assert (b"/FontFile2" in data and b"/Subtype /TrueType" in data) or b"/CIDFontType2" in data
    assert b"/Subtype /Image" not in data, "vectors"


def test_narrow_bar_chart_shows_its_complete_legend_and_the_differences_of_its_labels():
    parts = {f"part {n} of the step": ("red", [1.0, 2.0]) for n in range(7)}
    labels = ["a name that is too long, 1", "a name that is too long, 2"]
    figure = draw(Bars("", "time", labels, parts, horizontal=True), width=2.4)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*parts]
    assert legend.get_window_extent().xmax <= figure.bbox.xmax
    assert figure.get_size_inches()[0] == 2.4
    ticks = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert ticks == ["1", "2"]


def shown(labels, width=84 / 25.4):
    figure = draw(Bars("", "time", labels, {"a": ("red", [1.0] * len(labels))}, True), width)
    height, panel = figure.get_size_inches()[1], figure.axes[0]
    return [tick.get_text() for tick in panel.get_yticklabels()], height


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (
            ["3d, x=2 y=2 z=2, hidden=32 (3 seeds)", "1d, x=8"],
            "3d, x=2 y=2 z=2,\nhidden=32 (3 seeds)",
        ),
        (["3d, hidden=32, x=2 y=2 z=2", "1d, hidden=32, x=8 y=1 z=1 c=1"], "3d, x=2 y=2 z=2"),
        (["a" * 60, "a" * 30], "a" * 23 + "...\n" + "a" * 23),
        (
            [f"{'a' * 30}{number}{'a' * 30}" for number in (1, 2)],
            "a" * 26 + "\naaaa1" + "a" * 21 + "\n" + "a" * 9,
        ),
    ],
)
def test_long_names_are_wrapped_and_remain_different(labels, names):
    found, height = shown(labels)
    assert found[0] == names and found[0] != found[1]
    assert (height > shown(["a", "b"])[1]) == ("\n" in names)
    assert max(len(line) for name in found for line in name.splitlines()) <= 26


def test_entries_of_a_narrow_legend_remain_different():
    labels = [f"3d, x=2 y=2 z=2, hidden={size},\noptimizer=adamw (3 seeds)" for size in (32, 64)]
    runs = [Run(each.replace("\n", " "), (3.5, 3.25), [(1, 3.5)]) for each in labels]
    runs.append(Run("1d", (3.5, 3.25)))
    (legend,) = draw(charts.loss(runs), 84 / 25.4).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*labels, "1d", "validation"]


@pytest.mark.parametrize(("count", "last"), [(9, "run 8"), (12, "and 4 more")])
def test_legend_of_many_curves_names_the_first_ones_above_the_panel(count, last):
    figure = draw(charts.loss([Run(f"run {n}", (3.5, 3.25)) for n in range(count)]))
    assert figure.axes[0].get_legend() is None
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [*(f"run {n}" for n in range(8)), last]


def test_coinciding_curves_differ_in_width_and_dashes():
    (axes, _) = draw(charts.loss([Run(name, (3.5, 3.25)) for name in "abc"])).axes
    assert [line.get_linestyle() == "--" for line in axes.lines] == [False, True, True]
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(widths, reverse=True) and len({*widths}) == 3


def test_figure_is_saved_as_png_and_svg_reproducibly(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save(draw(charts.loss([Run("3d", (3.5, 3.25))])), tmp_path / name / "loss")
    with rc_context({"text.usetex": True, "font.family": "none", "axes.facecolor": "black"}):
        (tmp_path / "styled").mkdir()
        save(draw(charts.loss([Run("3d", (3.5, 3.25))])), tmp_path / "styled" / "loss")
    for end, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        one, two = ((tmp_path / name / f"loss.{end}").read_bytes() for name in ("one", "two"))
        assert one.startswith(start) and one == two
        assert one == (tmp_path / "styled" / f"loss.{end}").read_bytes()


def test_unknown_chart_type_is_rejected():
    with pytest.raises(TypeError):
        draw(object())
