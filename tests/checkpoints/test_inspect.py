"""What makes up a checkpoint: its tensors, and the rectangles of each, every element once."""

from hpc3d.checkpoints.inspect import config_of, inconsistencies, shapes_of
from hpc3d.checkpoints.sharded import Checkpoint
from tests.checkpoints.lives import live


def test_tensors_that_are_too_many_or_too_few_are_named(tmp_path):
    live(tmp_path, "serial", 1)
    opened = Checkpoint(tmp_path / "checkpoints" / "step-00000001")
    shapes = shapes_of(config_of(opened).model)
    assert [*inconsistencies(opened, shapes)] == []
    some = opened.sources["head.norm.beta", "value"]
    opened.sources["layers.7.odd", "value"] = some
    (line,) = inconsistencies(opened, shapes)
    assert line.endswith(" layers.7.odd, value")
    del opened.sources["layers.7.odd", "value"], opened.sources["head.norm.beta", "value"]
    (line,) = inconsistencies(opened, shapes)
    assert line.startswith("head.norm.beta, value: 24 of 24 ")
