"""Intervals of predicted step times, from the ratios in the machine file."""

from dataclasses import replace

import pytest

from hpc3d.predict.error_intervals import described, interval, kind_of_layout
from hpc3d.predict.machine.machine import Errors
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from hpc3d.predict.simulation.summary import summary
from tests.predict.machine.test_machine import CLUSTER

SMALL = ["--model.layers=1", "--model.hidden=16", "--model.heads=2", "--train.batch=4"]
SMALL += ["--mesh.x=1", "--mesh.y=1", "--mesh.z=1"]
EXPERTS = ["--model.kind=gpt2", "--model.experts=2", "--mesh.d=2"]


def config_of(*words):
    return load_resolved(None, [*SMALL, *words])


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["--mesh.d=2", "--parallel.zero=1"], "replicated"),
        (["--mesh.d=2", "--parallel.zero=2"], "sharded"),
        (["--mesh.c=2", "--mesh.d=2", "--parallel.zero=3"], "context"),
        (EXPERTS, "experts"),
    ],
)
def test_kind_of_a_layout(words, kind):
    config = config_of(*words)
    assert kind_of_layout(config) == kind
    machine = replace(CLUSTER, errors=(Errors(kind, 20, 0.9, 1.25),))
    assert "20 published step times" in described(interval(config, machine, 2.0), 2.0)


def test_interval_scales_with_the_prediction():
    config = config_of("--mesh.d=2")
    machine = replace(CLUSTER, errors=(Errors("replicated", 20, 0.9, 1.25),))
    found = interval(config, machine, 2.0)
    assert found == {"layout": "replicated", "steps": 20, "low_s": 1.8, "high_s": 2.5}
    text = described(found, 2.0)
    assert text.startswith("1.800 s to 2.500 s if the prediction error is in the central 80 % ")
    assert "of the errors for 20 published step times with ZeRO 0 or 1 (" in text
    longer = described(found, 1.7)
    assert "with ZeRO 0 or 1, most of which are longer than predicted (" in longer
    few = described(found | {"steps": 4}, 1.7)
    assert " is in the range of the errors for 4 published " in few
    assert ", all of which are longer than predicted (" in few
    step = summary(simulate(config, 64, machine), config, machine)
    assert step["interval"]["high_s"] == pytest.approx(1.25 * step["step_time_s"])


def test_no_interval_without_published_steps():
    config = config_of("--mesh.d=2")
    machine = replace(CLUSTER, errors=(Errors("sharded", 20, 0.9, 1.25),))
    assert interval(config, machine, 2.0) is None
    assert "interval" not in summary(simulate(config, 64, machine), config, machine)
