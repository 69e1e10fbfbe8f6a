"""Contents of a checkpoint: its tensors, and their blocks, which contain each element once."""

from hpc3d.checkpoints.inspect import (
    config_of,
    inconsistencies,
    problems,
    shapes_of,
    stateless_of,
    tensors,
)
from hpc3d.checkpoints.resume import mismatch
from hpc3d.checkpoints.sharded import Checkpoint
from tests.checkpoints import drawn_models
from tests.checkpoints.killed_runs import run_until


def test_extra_or_missing_tensors_are_named(tmp_path):
    run_until(tmp_path, "serial", 1)
    opened = Checkpoint(tmp_path / "checkpoints" / "step-00000001")
    shapes = shapes_of(config_of(opened).model)
    assert [*inconsistencies(opened, shapes)] == []
    some = opened.sources["head.norm.beta", "value"]
    opened.sources["layers.7.odd", "value"] = some
    (line,) = inconsistencies(opened, shapes)
    assert line.endswith(" layers.7.odd, value")
    del opened.sources["layers.7.odd", "value"], opened.sources["head.norm.beta", "value"]
    (line,) = inconsistencies(opened, shapes)
    assert line.startswith(f"{opened.folder}: head.norm.beta, value: 24 of 24 ")


def test_expert_checkpoint_is_complete_without_moments_of_the_router_bias(tmp_path):
    line = "d=2 e=2 x=2 zero=1 microbatches=2 experts=4 shared_experts=1 balance_bias=0.01 steps=3"
    folder = drawn_models.saved(tmp_path / "run", line)
    assert problems(folder) == []
    opened = Checkpoint(folder)
    config = config_of(opened)
    assert mismatch(config, opened) is None
    held = {tensor.name: tensor for tensor in tensors(opened)}
    assert held["layers.1.experts.up.weight"].shape == (24, 4, 96)
    assert len(held["layers.1.experts.up.weight"].kinds) == 3
    bias = held["layers.1.router.bias"]
    assert (bias.shape, bias.kinds, bias.bytes) == ((4,), ("value",), 32)
    shapes, stateless = shapes_of(config.model), stateless_of(config.model)
    opened.sources["layers.1.router.bias", "first"] = opened.sources.pop(
        ("layers.1.router.bias", "value")
    )
    opened.sources["layers.3.experts.up.weight", "second"].pop()
    unknown, nowhere, missing = inconsistencies(opened, shapes, stateless)
    assert unknown.endswith(" no layers.1.router.bias, first")
    assert nowhere.startswith(f"{folder}: layers.1.router.bias, value: 4 of 4 ")
    assert missing.startswith(f"{folder}: layers.3.experts.up.weight, second: 1152 of 9216 ")
