"""Planning in the command and the library; tests/test_plan.py tests the results."""

import re

import pytest

from hpc3d.config.load import literal
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.planning.planned_layouts import gigabytes, plan_layouts
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.studies.hopper_steps import config_of, published

TINY = ["--model.layers=1", "--model.hidden=32", "--model.heads=4", "--train.batch=4"]


def test_invalid_input_is_rejected_before_the_search():
    with pytest.raises(ValueError, match=r"mesh\.order = 'x y'"):
        plan_layouts("gpt-serial", ["--mesh.order", "x y"], 4, load("h100"))


@pytest.mark.parametrize(
    ("hidden", "sizes"),
    [
        ("32", "1MB, more"),
        ("128", "5MB (3MB with offloading or techniques that change the results)"),
    ],
)
def test_nearest_layout_and_sizes_are_named_if_nothing_fits(hidden, sizes):
    line = rf"no layout fits in 0\.00 MB .* needs .* on .* use --memory {re.escape(sizes)}"
    with pytest.raises(ValueError, match=line):
        plan_layouts("gpt-serial", [*TINY, f"--model.hidden={hidden}"], 1, load("h100"), 1000.0)


def test_sizes_are_printed_with_units():
    assert [gigabytes(size) for size in (1e6, 99e6, 1e9)] == ["1.00 MB", "99.00 MB", "1.00 GB"]


# Published steps on GPUs of 80 GB, whose layouts need more memory in the program of hpc3d, or as
# much as the name of the row says.
ROWS = {row["id"]: row for row in published()}
FITTING = {
    "maxtext-a3-llama2-7b-8": 80e9,
    "dgxc-24.11.1-maxtext-llama2-70b-64": 80e9,
    "llm-foundry-mpt-70b-s2048-64": None,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FITTING)
def test_plan_fits_where_a_published_layout_did(name):
    """If the published layout fits in 80 GB, the plan must also fit in its peak memory."""
    config, machine = config_of(ROWS[name]), load("h100")
    vocabulary, ranks = config.model.vocabulary, config.grid().size
    memory = FITTING[name] or max(run.peak["all"] for run in simulate(config, vocabulary, machine))
    keys = ROWS[name]["layout"] | {"train.dtype": "bfloat16", "train.backend": "cupy"}
    words = [f"--{key}={literal(value)}" for key, value in keys.items()]
    words = [word for word in words if word.startswith(("--model.", "--train."))]
    planned, resorted = plan_layouts(None, words, ranks, machine, memory, top=1)
    assert resorted is None
    assert planned.best[0].simulated and planned.best[0].peak <= memory
