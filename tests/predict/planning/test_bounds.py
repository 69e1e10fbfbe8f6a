"""What layouts move at least, and where the heaviest axes lie."""

from dataclasses import replace

import pytest

from hpc3d.predict.planning.bounds import Bounds, kind
from tests.predict.planning.test_search import CLUSTER, settled, step


def test_axis_with_the_most_traffic_is_placed_inside_a_node():
    config = settled("model.layers=4 model.hidden=512 train.batch=32 p=2 x=4 d=4 scheme=1d", 32)
    config = replace(config, mesh=replace(config.mesh, order="x p d c e y z"))
    turned = Bounds(config, 32, 256, CLUSTER).candidate(config).config
    assert turned.mesh.order == "p d x c e y z"
    assert step(turned)[0] < 0.8 * step(config)[0]


@pytest.mark.parametrize(
    ("line", "name"),
    [("d=4", "none"), ("x=4 scheme=1d", "1-D"), ("y=4", "3-D"), ("z=4", "3-D"), ("x=4", "3-D")],
)
def test_layout_kind_follows_the_axes_in_use(line, name):
    assert kind(settled(line, 4)) == name


def test_bound_of_a_mixture_counts_capacity_slots():
    """An expert has slots for a quarter of its even share: a fourth of what choices would take."""
    line = "model.hidden=1024 model.heads=8 model.layers=4 model.sequence=512 train.batch=32"
    config = settled(f"{line} model.experts=4 model.capacity=0.25 e=4 x=2")
    bounds = Bounds(config, 8, 256, CLUSTER)
    least, (seconds, _) = bounds.least(bounds.candidate(config)), step(config)
    assert 0.6 * seconds < least < seconds
