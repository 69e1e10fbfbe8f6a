"""Planning in the command and the library; tests/test_plan.py tests the results."""

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.planning.planned_layouts import gigabytes, plan_layouts

TINY = ["--model.layers=1", "--model.hidden=32", "--model.heads=4", "--train.batch=4"]


def test_invalid_input_is_rejected_before_the_search():
    with pytest.raises(ValueError, match=r"mesh\.order = 'x y'"):
        plan_layouts("gpt-serial", ["--mesh.order", "x y"], 4, load("h100"))


def test_nearest_layout_is_named_if_nothing_fits():
    with pytest.raises(ValueError, match=r"no layout fits in 0\.00 MB .* needs .* on "):
        plan_layouts("gpt-serial", TINY, 1, load("h100"), 1000.0)


def test_sizes_are_printed_with_units():
    assert [gigabytes(size) for size in (1e6, 99e6, 1e9)] == ["1.00 MB", "99.00 MB", "1.00 GB"]
