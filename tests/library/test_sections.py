"""Values by section are the options of a command line."""

import numpy as np
import pytest

from hpc3d.config.load import load
from hpc3d.library.sections import options_of


def test_values_arrive_as_what_they_are():
    given = {
        "name": "a 'b' \"c\"",
        "seed": 7,
        "mesh": {"x": 2, "order": "x y z"},
        "parallel": {"split": {"m": "x"}, "offload": ["optimizer"], "layers_per_stage": (1, 1)},
        "train": {"learning_rate": 1e-4, "clip": 2, "steps": np.int64(3), "warmup": None},
        "trace": {"enabled": False},
        "run": {"out": "1"},
    }
    config = load(None, options_of(given))
    assert (config.name, config.seed) == (given["name"], 7)
    assert (config.mesh.x, config.mesh.order) == (2, "x y z")
    assert config.parallel.split["m"] == "x"
    assert [*config.parallel.offload] == ["optimizer"]
    assert (config.train.learning_rate, config.trace.enabled) == (1e-4, False)
    assert (config.train.steps, config.train.warmup) == (3, load(None, []).train.warmup)
    assert config.run.out == "1"


def test_a_wrong_key_is_refused_with_the_line_of_the_command():
    with pytest.raises(ValueError, match=r"train\.lr: .* train\.learning_rate"):
        load(None, options_of({"train": {"lr": 1}}))
