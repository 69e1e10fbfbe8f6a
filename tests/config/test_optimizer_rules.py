"""8-bit moments require whole blocks of 256 columns."""

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve


def resolved(words):
    config = load(None, ["--train.optimizer", "adamw-8bit", "--model.heads", "4", *words.split()])
    return resolve(config, config.grid().size)


@pytest.mark.parametrize(
    "words",
    [
        "--model.hidden 256",
        "--model.hidden 512 --mesh.x 2 --parallel.scheme 1d",
        "--model.hidden 512 --mesh.x 2 --mesh.y 2 --mesh.z 2 --parallel.scheme 3d",
        "--model.hidden 256 --mesh.d 4 --parallel.zero 3",
        "--model.hidden 256 --mesh.e 2 --model.experts 4 --model.moe_every 2",
    ],
)
def test_8_bit_adamw_accepts_full_blocks_of_columns(words):
    assert resolved(words).train.optimizer == "adamw-8bit"


@pytest.mark.parametrize(
    "words", ["--model.hidden 256 --mesh.x 2 --parallel.scheme 1d", "--model.hidden 128"]
)
def test_8_bit_adamw_rejects_partial_blocks_of_columns(words):
    """Narrow matrices use full precision; with hidden = 128, qkv is the first that does not."""
    with pytest.raises(ValueError) as refused:
        resolved(words)
    assert str(refused.value) == (
        "train.optimizer = adamw-8bit: a rank has 384 columns of layers.0.qkv.weight, but the "
        "number must be a multiple of 256; use other sizes in [model] or [mesh], or "
        "train.optimizer = adamw"
    )


def test_other_optimizers_accept_any_column_count():
    config = load(None, ["--model.hidden", "24", "--model.heads", "4"])
    assert resolve(config, 1).train.optimizer == "adamw"
