"""A simulated schedule: its diagram and its numbers, as in the command."""

import pytest
from matplotlib import rc_context

import hpc3d


def test_simulated_schedule_has_a_diagram_numbers_and_a_figure():
    found = hpc3d.simulate_schedule("1f1b", 2, 3, forward=2, weight=0)
    assert repr(found).splitlines() == [
        "1f1b: 2 stages, 3 microbatches, 1 chunk, 1 step",
        "0 |F0--- F1---    B0 F2--- B1       B2",
        "1 |      F0--- B0 F1--- B1 F2--- B2",
    ]
    assert (found.makespan, found.bubble) == (12, 0.25)
    assert (found.in_flight, found.weight_inputs) == ([2, 1], [0, 0])
    assert found.timeline().figure.axes[0].get_ylabel() == "stage"


def test_diagram_of_101_columns_is_complete():
    found = hpc3d.simulate_schedule("zb-h1", 4, 8, weight=0.5)
    lines = str(found).splitlines()
    assert max(map(len, lines)) == 101 and lines[1].endswith("B7--W7")
    assert found.makespan == 24.5 and len(lines) == 5


def test_figure_style_ignores_the_matplotlibrc(tmp_path):
    found = hpc3d.simulate_schedule("1f1b", 2, 3)
    with rc_context({"text.usetex": True, "font.family": "none"}):
        drawing = found.timeline()
        drawing.save(tmp_path / "a.png")
        shown = drawing._repr_png_()
    assert shown == found.timeline()._repr_png_()
    found.timeline().save(tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_simulation_accepts_times_per_stage_and_message():
    even = hpc3d.simulate_schedule("gpipe", 2, 4)
    slow = hpc3d.simulate_schedule("gpipe", 2, 4, forward=[1, 2], comm=(0.5,))
    assert slow.makespan > even.makespan


@pytest.mark.parametrize(
    ("name", "how", "line"),
    [
        ("1f1", {}, "1f1b"),
        ("zb-v", {"chunks": 3}, "parallel.chunks = 3"),
        ("1f1b", {"fwd": 1}, "fwd: .* forward, backward, weight, comm"),
        ("1f1b", {"forward": -1}, "--forward = -1: "),
        ("1f1b", {"weight": [1, "2"]}, "--weight = '2': "),
        ("1f1b", {"forward": [1, 2, 3]}, "forward: 3 values for 2 model chunks"),
        ("1f1b", {"steps": 2}, "train.steps = 2: "),
    ],
)
def test_rejected_schedule_raises_value_error(name, how, line):
    with pytest.raises(ValueError, match=line):
        hpc3d.simulate_schedule(name, 2, 3, **how)


def test_search_returns_a_lower_bound():
    found = hpc3d.simulate_schedule("search", 2, 4, memory=2, forward=[3, 1])
    assert found.bound <= found.makespan and max(found.in_flight) <= 2
    assert hpc3d.simulate_schedule("zb-h1", 2, 4).bound is None
