"""The input files that come with the program."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from hpc3d.inputs import load
from hpc3d.rules import settle

INPUTS = Path(__file__).parent.parent / "inputs"


def ranks(config):
    return prod(config.mesh.sizes().values())


@pytest.mark.parametrize("path", sorted(INPUTS.glob("*.toml")), ids=lambda path: path.stem)
def test_each_keeps_the_rules_on_its_own_mesh(path):
    config = load(path, [])
    assert config.name == path.stem
    settle(config, ranks(config))


def test_a_pipeline_and_replicas_train_the_same():
    pair = [load(INPUTS / f"gpt-{name}.toml", []) for name in ("pp-vs-dp", "dp-vs-pp")]
    one, other = (replace(each, name="", mesh=None, parallel=None) for each in pair)
    assert one == other
    assert ranks(pair[0]) == ranks(pair[1])
