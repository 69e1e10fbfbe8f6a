"""The input file: types, keys, overrides, and the saved configuration text."""

import pickle
import re
from pathlib import Path

import pytest

from hpc3d.config.input_file import DataConfig
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems
from tests.elided import elided

SHIPPED = Path(__file__).parents[2] / "inputs" / "gpt-3d-64.toml"


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("train.steps", "many", "train.steps: ... 'many';"),
        ("train.steps", "2.5", "train.steps: ... 2.5;"),
        ("train.steps", "true", "train.steps: ... true;"),
        ("train.steps", '"20"', "train.steps: ... '20';"),
        ("train.clip", "[1]", "train.clip: ... [1];"),
        ("model.tied", "1", "model.tied: ... 1;"),
        ("data.path", "5", "data.path: ... 5;"),
        ("mesh", "8", "mesh: must be a table, not 8; ... [mesh]"),
        ("seed", "2025-01-02", "seed: ... '2025-01-02';"),
    ],
)
def test_wrong_type_is_rejected(option, value, line):
    (said,) = problems(f"--{option}", value)
    assert re.match(elided(line), said)


@pytest.mark.parametrize(
    ("weights", "ratio"),
    [
        (None, [1, 1]),
        ((2.0, 1.0), [2, 1]),
        ((0.7, 0.3), [7, 3]),
        ((1.5, 0.25), [6, 1]),
        ((3e3, 2e3), [3, 2]),
    ],
)
def test_weights_of_a_mixture_have_an_exact_ratio_of_integers(weights, ratio):
    assert DataConfig(path=("a", "b"), weights=weights).ratio() == ratio


def test_configuration_with_cached_splits_can_be_pickled():
    config = resolve(load(SHIPPED, []), 64)
    layouts = [split.x for split in config.splits.values()]
    received = pickle.loads(pickle.dumps(config))
    assert received == config and config.splits is config.splits
    assert [split.x for split in received.splits.values()] == layouts


def test_shipped_input_is_a_cube():
    config = resolve(load(SHIPPED, []), 64)
    assert config.sizes() == {"p": 1, "d": 1, "c": 1, "e": 1, "x": 4, "y": 4, "z": 4}
