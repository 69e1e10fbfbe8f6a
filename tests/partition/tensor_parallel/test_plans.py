"""Plans whose replicas consist of several ranks."""

import json
import re
from functools import cache

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition import plan_file
from hpc3d.partition.__main__ import main
from hpc3d.partition.capture import captured_of
from hpc3d.partition.module_plan import Wanted
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.tensor_parallel.plans import tensor_plan
from tests.partition.test_operation_costs import FLOP

POINTS = "inputs.partition.mlp:regression"


LARGE = "tests.partition.tensor_parallel.modules:transformer(layers=1, tied=True, vocabulary=4000)"


@cache
def operations(name):
    return Operations(captured_of(name))


def plan(ways, ranks=4, name="inputs.partition.bert:small", **how):
    return tensor_plan(operations(name), FLOP, 16, Wanted(ranks, **{"memory": 1e12, **how}), ways)


@pytest.mark.slow
def test_ranks_are_divided_into_groups():
    found = plan(2, replicas=(1, 1))
    assert found.costs.ways == 2 and found.choice.replicas == (1, 1)
    assert plan(2).choice.ranks <= 2


@pytest.mark.slow
def test_auto_is_the_fastest_of_all_numbers_of_ranks():
    found = {ways: plan(ways, microbatches=2).step.seconds for ways in (1, 2, 4)}
    best = plan(None, microbatches=2)
    assert best.step.seconds == min(found.values()) == found[best.costs.ways]


@pytest.mark.slow
def test_layer_that_exceeds_a_device_is_split():
    """The embedding and the head read a table of 512,000 bytes, with gradient and moments. One
    sample saves 80,000 bytes of logits."""
    how = {"ranks": 2, "name": LARGE, "microbatches": 16}
    with pytest.raises(ValueError, match="fits"):
        plan(1, memory=700_000, **how)
    found = plan(None, memory=700_000, **how)
    assert found.costs.ways == 2 and max(found.step.held) < 0.9 * 700_000
    with pytest.raises(ValueError, match="fits"):
        plan(None, memory=100_000, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "how", "line"),
    [
        (3, {}, "--tensor 3 must divide --ranks 4"),
        (2, {"zero": 1}, "--tensor 2: not supported with --zero 1"),
    ],
)
def test_unsupported_combinations_are_rejected(ways, how, line):
    with pytest.raises(ValueError, match=line):
        plan(ways, **how)


def test_command_writes_the_number_of_ranks(tmp_path, capsys):
    path = tmp_path / "plan.json"
    words = [POINTS, "--ranks", "4", "--tensor", "2", "-o", str(path), "--json"]
    assert main(words) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    saved = plan_file.load(path)
    assert found["tensor"] == saved.tensor == 2
    assert saved.ranks == 2 * sum(found["replicas"])
    assert f"mpirun -np {saved.ranks} " in out and "each replica consists of 2 ranks" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--tensor", "2", "-o", "plan.py"], r"--tensor 2: not supported by plan\.py"),
        (["--tensor", "2", "--profile", "profile.json"], "--tensor 2: not supported with --prof"),
        (["--tensor", "7"], "--tensor 7: the model has no linear layers that can be split over 7"),
    ],
)
def test_command_rejects_what_has_no_tensor_parallelism(words, line, capsys):
    assert main([POINTS, "--ranks", "14", *words]) == 2
    assert re.search(line, capsys.readouterr().err)
