"""What is in a chart, whatever draws it."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from hpc3d.analyze.metrics.expert_loads import ExpertLoads
from hpc3d.analyze.report import charts, palette
from hpc3d.comm.grid import AXES
from hpc3d.comm.mesh import WORLD
from hpc3d.trace.schema import CATEGORY


def test_a_matrix_of_many_ranks_is_summed_in_blocks():
    matrix = np.zeros((600, 600))
    matrix[0, 1] = matrix[2, 2] = 1e6
    matrix[599, 0] = 3e6
    chart = charts.traffic(matrix)
    assert (chart.ranks, chart.values.shape) == (3, (200, 200))
    assert (chart.values[0, 0], chart.values[199, 0]) == (2, 3)
    assert np.isnan(chart.values).sum() == 200**2 - 2


def test_a_speedup_is_drawn_beside_the_ideal():
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


def test_every_series_begins_at_a_first_run_on_one_rank():
    rows = [scaled("", 1, 1.0), scaled("1d", 4, 2.0), scaled("3d", 8, 7.0, "weak")]
    assert charts.speedup(rows).lines == {
        "ideal": ([1, 4, 8], [1, 4, 8]),
        "1d, strong": ([1, 4], [1.0, 2.0]),
        "3d, weak": ([1, 8], [1.0, 7.0]),
    }


def test_runs_that_are_no_series_have_no_speedup_figure():
    assert charts.speedup([scaled("3d", 8, 1.0), scaled("1d", 4, 0.5)]) is None


def loads(steps, layers):
    """Loads of 4 experts, of which the first has all in odd steps."""
    chosen = np.full((steps, layers, 4), 6)
    chosen[1::2] = [24, 0, 0, 0]
    losses = np.zeros((steps, layers))
    return ExpertLoads(np.arange(steps), np.arange(layers), chosen, chosen, losses, losses, None)


def test_the_load_of_experts_is_drawn_by_step():
    chart = charts.expert_loads(loads(3, 2))
    assert chart.edges.tolist() == [0, 1, 2, 3] and [*chart.maps] == [0, 1]
    assert chart.maps[1].tolist() == [[1, 4, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1]]


def test_many_steps_are_means_and_many_layers_some_of_them():
    chart = charts.expert_loads(loads(601, 40))
    assert chart.edges.tolist() == [*range(0, 601, 3), 601]
    assert chart.maps[0][0, :2].tolist() == [2, 3] and chart.maps[0][0, -1] == 1
    assert len(chart.maps) == 12 and {0, 39} <= {*chart.maps}


def scaled(layout, ranks, speedup, scaling="strong"):
    return {"layout": layout, "ranks": ranks, "speedup": speedup, "scaling": scaling}


@pytest.mark.parametrize(
    ("largest", "unit", "value"),
    [(300, "B", 300), (3e5, "kB", 300), (3e6, "MB", 3), (4e9, "GB", 4), (5e12, "TB", 5)],
)
def test_a_matrix_has_a_unit_of_its_size(largest, unit, value):
    chart = charts.traffic(np.array([[0, largest], [0, 0]]))
    assert (chart.unit, chart.values[0, 1]) == (f"{unit} per step", value)


def test_time_by_phase_has_a_part_for_each_axis():
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


def test_no_two_parts_of_a_step_have_one_colour():
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
    """How far two colors are from each other, of the distance from black to white."""
    return float(np.linalg.norm(np.subtract(to_rgb(one), to_rgb(other)))) / 3**0.5
