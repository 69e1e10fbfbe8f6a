"""All stage classes conform to `PipelineStage`, and the engine uses no other attributes."""

import inspect

import pytest

from hpc3d.comm.threads import run
from hpc3d.model.stage import Stage
from hpc3d.pipeline.stage_protocol import PipelineStage
from hpc3d.predict.simulation.replay import ReplayedStage
from tests.pipeline.mixes import config_of, trained_of, trainer_of

MEMBERS = {name: member for name, member in vars(PipelineStage).items() if name[0] != "_"}


def violations(kind):
    """Return the violations of PipelineStage in a class: missing members, different signatures.
    Extra parameters must have defaults."""
    for name, wanted in MEMBERS.items():
        found = getattr(kind, name, None)
        if isinstance(wanted, property):
            if not isinstance(found, property):
                yield f"{name} is no property"
        elif not callable(found):
            yield f"{name} is no method"
        elif problem := other_parameters(inspect.signature(wanted), inspect.signature(found)):
            yield f"{name}: {problem}"


def other_parameters(wanted, found):
    names, ours = list(wanted.parameters), list(found.parameters)
    more = [found.parameters[name] for name in ours[len(names) :]]
    if ours[: len(names)] != names or any(each.default is each.empty for each in more):
        return f"{found} for {wanted}"


def test_stage_protocol_members():
    assert set(MEMBERS) == {"units", "auxiliary_loss", "incoming", "forward", "backward"}


@pytest.mark.parametrize("kind", [Stage, ReplayedStage])
def test_stages_implement_the_protocol(kind):
    assert not [*violations(kind)]


class Sound:
    @property
    def units(self):
        return []

    @property
    def auxiliary_loss(self):
        return 0.0

    def incoming(self, kind, micro):
        return [((micro.sequences, 1), "float64")]

    def forward(self, x, micro, starting):
        return x, None

    def backward(self, dy, saved, micro, defer, finished=None, more=0):
        return dy


def without(name):
    return type("Planted", (), {k: v for k, v in vars(Sound).items() if k != name})


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_missing_protocol_member_is_reported(name):
    assert not [*violations(Sound)]
    (problem,) = violations(without(name))
    assert problem.startswith(name)


PLANTED = {
    "forward": lambda self, micro, x, starting: (x, None),
    "backward": lambda self, dy, saved, micro, defer: dy,
    "incoming": lambda self, kind, sequences: [((sequences, 1), kind)],
    "units": lambda self: [],
    "auxiliary_loss": lambda self: 0.0,
}


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_different_signature_is_reported(name):
    (problem,) = violations(type("Planted", (Sound,), {name: PLANTED[name]}))
    assert problem.startswith(name)


class Bare:
    """Stage with the members of the protocol only."""

    def __init__(self, stage):
        self._stage = stage

    def __getattr__(self, name):
        assert name in MEMBERS
        return getattr(self._stage, name)


@pytest.mark.parametrize(
    "line",
    [
        "p=1 schedule=none microbatches=2",
        "p=2 d=2 schedule=1f1b microbatches=3",
        "p=2 x=2 schedule=zb-h1 microbatches=3 recompute=full",
        "p=2 schedule=interleaved chunks=2 microbatches=2",
    ],
)
def test_engine_uses_only_the_stage_protocol(line):
    config = config_of(f"steps=2 {line}")

    def rank(mesh, wrap):
        trainer = trainer_of(mesh, config)
        trainer.engine.stages = [wrap(stage) for stage in trainer.engine.stages]
        return trained_of(trainer, [trainer.step(number) for number in range(2)])

    plain, bare = (
        run(config.sizes(), lambda mesh, wrap=wrap: rank(mesh, wrap))
        for wrap in (lambda stage: stage, Bare)
    )
    for ours, theirs in zip(bare, plain, strict=True):
        assert ours.totals == theirs.totals
        for name, (_, block) in ours.weights.items():
            assert (block == theirs.weights[name][1]).all(), name
