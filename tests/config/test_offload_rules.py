"""Offload settings that are rejected, and limits that are accepted."""

import re

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems
from tests.elided import elided

STATES, OTHERS, ALL = (
    f"--parallel.offload {what}"
    for what in ('["optimizer"]', '["activations","parameters"]', '["optimizer","parameters"]')
)
PIPEDREAM = "--parallel.schedule pipedream --mesh.p 2 --train.clip 0 --model.tied false"
GRAPH = "--train.backend cupy --train.cuda_graph true"
# Options, and the line.
WRONG = {
    '--parallel.offload ["optimizer","optimizer"]': (
        "parallel.offload = ['optimizer', 'optimizer'] ... once"
    ),
    f"{ALL} --train.optimizer sgd": "parallel.offload = ...: train.optimizer = sgd ...",
    f"{STATES} --train.optimizer adafactor": (
        'parallel.offload = ...: train.optimizer = adafactor ... remove "optimizer", or ...'
    ),
    f"{ALL} {PIPEDREAM}": (
        "parallel.offload = ...: schedule pipedream ... use a synchronous schedule"
    ),
}
RIGHT = [
    f"{OTHERS} --train.optimizer sgd",
    f"{STATES} --train.optimizer muon {PIPEDREAM}",
    f"{STATES} {GRAPH}",
    f"{OTHERS} {GRAPH}",
]


@pytest.mark.parametrize("options", WRONG)
def test_invalid_offload_settings_are_rejected_in_one_line(options):
    (line,) = problems(*options.split(), ranks=2)
    assert re.fullmatch(elided(WRONG[options]), line), line


@pytest.mark.parametrize("options", RIGHT)
def test_valid_offload_settings_are_accepted(options):
    resolve(load(None, options.split()), 2)


@pytest.mark.parametrize("value", ["weights", '["weights"]', "true"])
def test_unknown_offload_value_error_lists_the_known_ones(value):
    (line,) = problems("--parallel.offload", value, ranks=1)
    item = "[0]" if value.startswith("[") else ""
    assert line.startswith(f"parallel.offload{item}: input should be ")
    assert "'optimizer', 'activations' or 'parameters', not" in line
