"""Parts of an estimate by hand; the whole is compared with simulations in test_search."""

import pytest

from hpc3d.predict.planning.estimate import Estimator
from hpc3d.predict.planning.peak import contents, stage_content
from tests.pipeline.mixes import config_of
from tests.predict.fixed import ALPHA, LAUNCH, LINE, MACHINE

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
def test_two_copies_of_a_tied_table_exchange_their_gradients(line, messages):
    config = config_of(f"{line} dtype=float32")
    seconds = (
        Estimator(29, MACHINE)
        .tied_exchange(config, [*map(stage_content, contents(config))])
        .seconds
    )
    assert messages * (LAUNCH + ALPHA + TABLE / LINE) <= seconds
    assert seconds <= messages * (LAUNCH + ALPHA + (TABLE + POSITIONS) / LINE)
