"""Costs of exchanges and updates, compared with known values."""

from dataclasses import replace

import pytest

from hpc3d.ops.update import orthogonalize_flops
from hpc3d.predict.planning.cost_table import CostTable
from hpc3d.predict.planning.pass_costs import StageContent
from hpc3d.predict.planning.peak import contents, stage_content
from tests.pipeline.mixes import config_of
from tests.predict.fixed import ALPHA, FLOPS, LAUNCH, LINE, MACHINE

TABLE, POSITIONS = 29 * 24 * 4, 3 * 24 * 4  # bytes of a gradient in float32


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ("p=2 schedule=1f1b microbatches=4", 1),
        ("p=2 schedule=1f1b microbatches=4 tied=false", 0),
        ("p=1 schedule=none", 0),
        ("p=1 schedule=none tied=false", 0),
        ("p=2 schedule=zb-v chunks=2 microbatches=4", 0),  # both ends on one stage
    ],
)
def test_tied_table_copies_exchange_their_gradients(line, messages):
    config = config_of(f"{line} dtype=float32")
    stages = [*map(stage_content, contents(config))]
    seconds = CostTable(29, MACHINE).tied_exchange(config, stages).seconds
    assert messages * (LAUNCH + ALPHA + TABLE / LINE) <= seconds
    assert seconds <= messages * (LAUNCH + ALPHA + (TABLE + POSITIONS) / LINE)


@pytest.mark.parametrize(
    ("line", "sharing"),
    [
        ("schedule=none", 1),
        ("d=2 x=4 schedule=none zero=1", 8),
        ("p=2 x=2 y=2 schedule=1f1b scheme=2d", 4),
    ],
)
@pytest.mark.parametrize("way", ["in-turn", "sharded"])
def test_ranks_share_the_products_of_a_muon_update(line, sharing, way):
    """Tests the products of q, k, v, proj, up and down in all layers of a stage, and their
    kernels, which take no longer."""
    config = config_of(f"{line} layers=16 dtype=float32 optimizer=muon hidden=192")
    adamw = replace(config, train=replace(config.train, optimizer="adamw"))
    config = replace(config, train=replace(config.train, orthogonalize=way))
    stage = stage_content(contents(config)[0])
    more = CostTable(29, MACHINE).update(config, stage)[1].busy
    more -= CostTable(29, MACHINE).update(adamw, stage)[1].busy
    sizes = [(192, 192)] * 4 + [(192, 4 * 192)] * 2
    products = sum(map(orthogonalize_flops, sizes)) * stage.layers / FLOPS / sharing
    assert products < more < 2 * products


def test_time_of_an_update_is_linear_in_the_layers():
    config = config_of("layers=4 schedule=none dtype=float32")
    stages = [StageContent(layers, False, False, 0) for layers in (1, 2, 3)]
    one, two, three = (CostTable(29, MACHINE).update(config, each)[1].busy for each in stages)
    assert two - one == pytest.approx(three - two, rel=1e-3)
