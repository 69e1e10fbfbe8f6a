"""Values of a resolved configuration for keys that the input file does not set."""

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve


@pytest.mark.parametrize(
    ("words", "name"),
    [([], "gpt"), (["--model.kind", "bert"], "bert"), (["--name", "a"], "a")],
)
def test_unnamed_run_is_named_after_its_model_family(words, name):
    assert resolve(load(None, words), 1).name == name
