"""Contents of charts, independent of the plotting library."""

from dataclasses import dataclass
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from hpc3d.analyze.metrics.expert_loads import ExpertLoads
from hpc3d.analyze.report import charts, palette, plot_bokeh, plot_matplotlib
from hpc3d.analyze.report.figure_list import of_runs
from hpc3d.analyze.run_comparison import SeedGroup
from hpc3d.comm.grid import AXES
from hpc3d.comm.mesh import WORLD
from hpc3d.trace.schema import CATEGORY

RANK_COLUMNS = [
    f"{part}_s"
    for part in ("compute", "exposed", "transfer", "wait", "copy", "other", "unrecorded")
]


def test_traffic_matrix_of_many_ranks_is_binned():
    matrix = np.zeros((600, 600))
    matrix[0, 1] = matrix[2, 2] = 1e6
    matrix[599, 0] = 3e6
    chart = charts.traffic(matrix)
    assert (chart.ranks, chart.values.shape) == (3, (200, 200))
    assert (chart.values[0, 0], chart.values[199, 0]) == (2, 3)
    assert np.isnan(chart.values).sum() == 200**2 - 2


def test_speedup_chart_includes_the_ideal_line():
    rows = [
        scaled("3d", 8, 1.0),
        scaled("1d", 8, 0.5),
        scaled("3d", 64, 6.0),
        scaled("3d", 27, 2.0, "other"),
        scaled("3d", 2, None),
        scaled("3d", 4, 0.2),
    ]
    assert charts.speedup(rows).lines == {
        "ideal": ([4, 8, 64], [1 / 2, 1, 8]),
        "3d, strong": ([4, 8, 64], [0.2, 1.0, 6.0]),
    }


def test_speedup_series_start_at_a_single_rank_baseline():
    rows = [scaled("", 1, 1.0), scaled("1d", 4, 2.0), scaled("3d", 8, 7.0, "weak")]
    assert charts.speedup(rows).lines == {
        "ideal": ([1, 4, 8], [1, 4, 8]),
        "1d, strong": ([1, 4], [1.0, 2.0]),
        "3d, weak": ([1, 8], [1.0, 7.0]),
    }


def test_speedup_series_are_named_by_the_labels_that_runs_share():
    """The sharded dimensions of a scheme depend on the number of ranks."""
    rows = [
        scaled("1d", 2, 1.0, label="1-D"),
        scaled("3d (shards only m)", 2, 0.9, label="3-D"),
        scaled("1d", 4, 1.8, label="1-D"),
        scaled("3d", 4, 1.9, label="3-D"),
    ]
    assert {*charts.speedup(rows).lines} == {"ideal", "1-D, strong", "3-D, strong"}
    own = [row | {"label": row["run"]} for row in rows]
    assert {*charts.speedup(own).lines} == {"ideal", "1d, strong"}


def test_speedup_over_another_run_than_the_first_one_is_not_drawn():
    rows = [scaled("3d", ranks, ranks / 8, reference="3d, 8") for ranks in (8, 16)]
    others = [scaled("3d", ranks, 1.0, reference="3d, 4") for ranks in (4, 32)]
    assert charts.speedup([*rows, *others]).lines == charts.speedup(rows).lines


def test_unrelated_runs_have_no_speedup_chart():
    assert charts.speedup([scaled("3d", 8, 1.0), scaled("1d", 4, 0.5)]) is None


@dataclass
class Seed:
    """The parts of a run that are averaged over the runs of a group."""

    label: str
    tables: dict


def seed(name, *losses, compute_s=1.0):
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    tables = {key: [] for key in ("evaluation", "validation", "attempts")}
    ranks = [dict.fromkeys(RANK_COLUMNS, 0.0) | {"compute_s": compute_s}]
    return Seed(name, tables | {"loss": rows, "ranks": ranks})


def test_groups_of_seeds_have_one_curve_with_a_band_and_one_bar():
    runs = [seed("a, 1", 5.0, 3.0, 2.0), seed("b", 4.0, 2.0), seed("a, 2", 7.0, 2.0, compute_s=3)]
    groups = [SeedGroup("a (2 seeds)", {1: [0], 2: [2]}), SeedGroup("b", {1: [1]})]
    pairs = [groups[0], SeedGroup("b (2 seeds)", {1: [1], 2: [1]})]
    assert [run.label for run in charts.averaged(runs, pairs)] == ["a", "b"]
    assert (charts.common_size(pairs), charts.common_size(groups)) == ("2 seeds", "")
    drawn = charts.averaged(runs, groups)
    chart, bars = charts.loss(drawn), charts.runs(drawn)
    assert chart.lines == {"a (2 seeds)": ([0, 1], [6.0, 2.5]), "b": ([0, 1], [4.0, 2.0])}
    assert chart.bands == {"a (2 seeds)": ([0, 1], [5.0, 2.0], [7.0, 3.0])}
    assert chart.lower == {"b": ([0, 1], [-2.0, -0.5])}
    assert (bars.labels, bars.parts["compute"][1]) == (["a (2 seeds)", "b"], [2e3, 1e3])
    (band,) = plot_matplotlib.draw(chart).axes[0].collections
    assert band.get_datalim(band.axes.transData).intervaly.tolist() == [2, 7]
    assert "VArea" in {type(each).__name__ for each in plot_bokeh.draw(chart).references()}


def test_losses_are_subtracted_from_those_of_the_reference():
    """The group without a comparable reference and the references have no curve."""
    runs = [seed(name, loss) for name, loss in zip("abcde", (5.0, 4.0, 3.0, 2.5, 9.0))]
    groups = [
        SeedGroup(run.label, {1: [index]}, reference, comparable=index < 4)
        for index, (run, reference) in enumerate(zip(runs, (0, 0, 2, 2, 0)))
    ]
    chart = charts.loss(runs, groups)
    assert chart.lower == {"b": ([0], [-1.0]), "d": ([0], [-0.5])}
    assert chart.lower_ylabel == "difference from\nthe reference [nat]"
    assert charts.loss(runs[:2], groups[:2]).lower_ylabel == "difference from\nthe first run [nat]"
    assert charts.loss(runs[:1], groups[:1]).lower is None
    for count, names_column in ((5, True), (2, False)):
        report = SimpleNamespace(
            tables={"scaling": [{}]}, runs=runs[:count], groups=groups[:count]
        )
        figure = next(of_runs(report))
        assert ("the column reference of the table" in figure.caption) is names_column


def loads(steps, layers):
    """Return the loads of 4 experts; in odd steps, the first expert gets all tokens."""
    chosen = np.full((steps, layers, 4), 6)
    chosen[1::2] = [24, 0, 0, 0]
    losses = np.zeros((steps, layers))
    return ExpertLoads(np.arange(steps), np.arange(layers), chosen, chosen, losses, losses, None)


def test_expert_load_map_by_step():
    chart = charts.expert_loads(loads(3, 2))
    assert chart.edges.tolist() == [0, 1, 2, 3] and [*chart.maps] == [0, 1]
    assert chart.maps[1].tolist() == [[1, 4, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1]]


def test_expert_load_map_averages_steps_and_samples_layers():
    chart = charts.expert_loads(loads(601, 40))
    assert chart.edges.tolist() == [*range(0, 601, 3), 601]
    assert chart.maps[0][0, :2].tolist() == [2, 3] and chart.maps[0][0, -1] == 1
    assert len(chart.maps) == 12 and {0, 39} <= {*chart.maps}


def scaled(layout, ranks, speedup, scaling="strong", reference=None, label=""):
    row = {"layout": layout, "ranks": ranks, "speedup": speedup, "scaling": scaling}
    row["label"] = label
    return row | {"run": f"{layout}, {ranks}", "reference": reference}


@pytest.mark.parametrize(
    ("largest", "unit", "value"),
    [(300, "B", 300), (3e5, "kB", 300), (3e6, "MB", 3), (4e9, "GB", 4), (5e12, "TB", 5)],
)
def test_traffic_matrix_unit_depends_on_its_largest_value(largest, unit, value):
    chart = charts.traffic(np.array([[0, largest], [0, 0]]))
    assert (chart.unit, chart.values[0, 1]) == (f"{unit} per step", value)


def test_phase_chart_has_a_segment_per_axis():
    rows = [
        {"category": "compute", "phase": "forward", "axis": "", "seconds": 1.0},
        {"category": "comm", "phase": "forward", "axis": "x", "seconds": 0.5},
        {"category": "comm", "phase": "backward", "axis": "x", "seconds": 0.25},
        {"category": "unrecorded", "phase": "", "axis": "", "seconds": 0.125},
    ]
    chart = charts.phases(rows)
    assert chart.labels == ["forward", "backward", "unrecorded"]
    assert {part: values for part, (_, values) in chart.parts.items()} == {
        "compute": [1000, 0, 0],
        "along x": [500, 250, 0],
        "unrecorded": [0, 0, 125],
    }
    assert len({color for color, _ in chart.parts.values()}) == 3


def test_segments_of_the_phase_chart_have_distinct_colors():
    parts = [
        {"category": category, "axis": ""} for category in (*CATEGORY, "unrecorded", "recorded")
    ]
    parts += [{"category": "comm", "axis": axis} for axis in (*AXES, WORLD)]
    chart = charts.phases([row | {"phase": "forward", "seconds": 1.0} for row in parts])
    assert chart.parts.keys() >= {"io", "along x", "over all ranks", "unrecorded"}
    colors = {color for color, _ in chart.parts.values()} | {palette.WORK["other"]}
    assert len(colors) == len(parts) + 1
    assert min(map(apart, *zip(*combinations(colors, 2)))) > 0.1


def apart(one, other):
    """Return the distance of two colors, relative to that of black and white."""
    return float(np.linalg.norm(np.subtract(to_rgb(one), to_rgb(other)))) / 3**0.5
