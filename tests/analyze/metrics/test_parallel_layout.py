"""Names of layouts, and the number of dimensions in which they shard the products."""

import pytest

from hpc3d.analyze.metrics.parallel_layout import layout_of
from hpc3d.config.load import to_toml
from tests.analyze.synthetic import by_hand, row
from tests.analyze.traces import config_of

FULL = {"x": 2, "y": 2, "z": 2}
FLAT = {"x": 2, "y": 2, "z": 1}


@pytest.mark.parametrize(
    ("sizes", "settings", "label", "family"),
    [
        (FULL, {}, "3d, x=2 y=2 z=2", "3d"),
        (FULL, {"scheme": "3d-broadcast"}, "3d-broadcast, x=2 y=2 z=2", "3d"),
        (FULL, {"scheme": "2.5d"}, "2.5d, x=2 y=2 z=2", "2.5d"),
        (FLAT, {"scheme": "2.5d"}, "2.5d, x=2 y=2", "2d"),
        (FLAT, {}, "3d (shards only m and n), x=2 y=2", "2d"),
        (FLAT, {"scheme": "2d-summa"}, "2d-summa, x=2 y=2", "2d"),
        ({"x": 4}, {"scheme": "1d"}, "1d, x=4", "1d"),
        ({"y": 4}, {}, "3d (shards only n), y=4", "1d"),
        ({"z": 4}, {}, "3d (shards only k), z=4", "1d"),
        ({"x": 4}, {}, "3d (shards only m), x=4", None),
        ({}, {}, "1 rank", None),
        ({"d": 4}, {}, "data parallel, d=4", None),
        ({"d": 4}, {"zero": 2}, "ZeRO 2, d=4", None),
        ({"p": 4}, {"schedule": "1f1b", "microbatches": 4}, "1f1b, p=4", None),
        ({"p": 4}, {"schedule": "gpipe", "microbatches": 4}, "gpipe, p=4", None),
        (
            {"p": 2, "d": 2, "x": 2},
            {"schedule": "zb-h1", "microbatches": 4, "zero": 1, "scheme": "1d"},
            "1d, zb-h1, ZeRO 1, p=2 d=2 x=2",
            "1d",
        ),
    ],
)
def test_layout_label_names_only_the_axes_in_use(tmp_path, sizes, settings, label, family):
    mesh = dict.fromkeys("pdxyz", 1) | sizes
    values = {f"mesh__{axis}": size for axis, size in mesh.items()}
    values |= {f"parallel__{key}": value for key, value in settings.items()}
    ranks = 1
    for size in mesh.values():
        ranks *= size
    config = config_of(ranks, model__heads=4, **values)
    text = {"config": to_toml(config), "axes": " ".join(mesh), "axis_sizes": [*mesh.values()]}
    steps = {(0, 0): (0, 10)}
    with by_hand(tmp_path / "t.h5", [row(0, 0, 1)], steps, hosts=["a"] * ranks, **text) as trace:
        found = layout_of(trace)
    assert (found.label, found.family) == (label, family)


def test_layout_label_of_a_configuration_without_a_schedule(tmp_path):
    text = {"config": "[train]\nsteps = 3\n", "axes": "p x", "axis_sizes": [2, 1]}
    steps = {(0, 0): (0, 10)}
    with by_hand(tmp_path / "t.h5", [row(0, 0, 1)], steps, hosts=["a", "a"], **text) as trace:
        assert layout_of(trace).label == "pipeline, p=2"


def test_layout_label_without_a_configuration_is_the_run_name(tmp_path):
    with by_hand(tmp_path / "t.h5", [row(0, 0, 1)], {(0, 0): (0, 10)}) as trace:
        assert layout_of(trace).label == "synthetic, 1 rank"
