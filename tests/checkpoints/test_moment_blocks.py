"""8-bit moments loaded on other layouts are quantized again only if blocks have other borders."""

import numpy as np
import pytest

from hpc3d.checkpoints.inspect import problems
from hpc3d.checkpoints.resume import mismatch
from hpc3d.checkpoints.sharded import Checkpoint, Snapshot, complete, restore, write_shard
from hpc3d.comm.threads import run
from hpc3d.config.load import to_toml
from hpc3d.ops.quantize import BLOCK, LEVELS
from tests.pipeline.mixes import config_of, trainer_of
from tests.training.optimizers.test_adamw_8bit import LINE, SHORT
from tests.training.optimizers.test_optimizer import checkpoint


def decoded(opened, name, moment):
    """Return a moment of a matrix, decoded file by file, and the scale of each element."""
    pieces = [opened.sources[name, f"{moment}_{each}"] for each in ("codes", "scales")]
    shape = [max(box.bottom for _, box in pieces[0]), max(box.right for _, box in pieces[0])]
    value, scale = np.full(shape, np.nan), np.full(shape, np.nan)
    for (codes, box), (scales, _) in zip(*pieces, strict=True):
        here = slice(box.top, box.bottom), slice(box.left, box.right)
        scale[here] = np.repeat(scales[:, 0], BLOCK, 1)[:, : codes.shape[-1]]
        value[here] = LEVELS[int(moment == "second")][codes[:, 0]] * scale[here]
    return value, scale


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after", [(SHORT, SHORT), (SHORT, "d=2 zero=1"), ("d=2 zero=1", SHORT), ("", "")]
)
def test_moments_are_quantized_again_only_in_other_blocks(before, after, tmp_path):
    """All files are complete. Values change by at most half the largest distance of levels."""
    line = f"{LINE} hidden=256 layers=1 steps=4"
    opened, folder = checkpoint(f"{line} {before}", tmp_path), tmp_path / "again" / "step-00000003"
    config = config_of(f"{line} {after}")
    assert mismatch(config, opened) is None
    folder.with_suffix(".tmp").mkdir(parents=True)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)
        snapshot = Snapshot(trainer.parameters, trainer.optimizer)
        write_shard(folder.with_suffix(".tmp"), mesh.rank, snapshot)
        if mesh.rank == 0:
            header = {**opened.header, "config": to_toml(config)}
            assert not complete(folder.with_suffix(".tmp"), mesh.ranks, header, keep=1)

    run(config.sizes(), rank)
    assert problems(opened.folder) == problems(folder) == []
    for moment in ("first", "second"):
        old, old_scale = decoded(opened, "layers.0.qkv.weight", moment)
        new, scale = decoded(Checkpoint(folder), "layers.0.qkv.weight", moment)
        if before == after:
            np.testing.assert_array_equal(new, old)
            np.testing.assert_array_equal(scale, old_scale)
        else:
            assert (scale != old_scale).any()
            half = np.diff(LEVELS[int(moment == "second")].astype(float)).max() / 2
            assert (np.abs(new - old) <= half * 1.0001 * scale).all()
        assert (np.abs(old) <= old_scale).all() and old.any()
