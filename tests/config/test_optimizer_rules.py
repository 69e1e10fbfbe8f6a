"""8-bit moments support any number of columns per rank."""

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
        "--model.hidden 128",
        "--model.hidden 300",
        "--model.hidden 256 --mesh.x 2 --parallel.scheme 1d",
        "--model.hidden 512 --mesh.x 2 --parallel.scheme 1d",
        "--model.hidden 512 --mesh.x 2 --mesh.y 2 --mesh.z 2 --parallel.scheme 3d",
        "--model.hidden 256 --mesh.d 4 --parallel.zero 3",
        "--model.hidden 256 --mesh.e 2 --model.experts 4 --model.moe_every 2",
    ],
)
def test_8_bit_adamw_accepts_any_column_count(words):
    assert resolved(words).train.optimizer == "adamw-8bit"


def test_other_optimizers_accept_any_column_count():
    config = load(None, ["--model.hidden", "24", "--model.heads", "4"])
    assert resolve(config, 1).train.optimizer == "adamw"
