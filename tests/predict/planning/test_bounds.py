"""What layouts move at least, and where the heaviest axes lie."""

from dataclasses import replace

from hpc3d.predict.planning.bounds import Bounds
from tests.predict.planning.test_search import CLUSTER, settled, step


def test_the_heaviest_axis_lies_inside_a_node():
    config = settled("model.layers=4 model.hidden=512 train.batch=32 p=2 x=4 d=4 scheme=1d", 32)
    config = replace(config, mesh=replace(config.mesh, order="x p d c e y z"))
    turned = Bounds(config, 32, 256, CLUSTER).candidate(config).config
    assert turned.mesh.order == "p d x c e y z"
    assert step(turned)[0] < 0.8 * step(config)[0]
