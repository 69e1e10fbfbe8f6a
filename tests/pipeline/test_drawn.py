"""Mixes drawn at random: each trains the model of one rank and of torch, or is refused."""

from functools import cache

import pytest
from hypothesis import event, given, settings

from hpc3d.comm.threads import run
from tests.fakes.read_only import read_only
from tests.mpi import checked
from tests.pipeline.drawn import MODELS, mixes, mixtures
from tests.pipeline.in_torch import RULES
from tests.pipeline.mixes import alone, config_of, cover, ranks, same, serial, train
from tests.strided import strided


@cache
def serial_as_torch(line):
    """One rank, and torch, say the same; where nothing is dropped."""
    found = serial(line)
    if "dropout=0.25" not in line:
        same(found, RULES["none"](config_of(line)))
    return found


def expected_of(line, config):
    rule = RULES.get(config.parallel.schedule, RULES["none"])
    return serial_as_torch(alone(line)) if rule is RULES["none"] else rule(config)


def right(line):
    """Raise where a mix that the rules allow does not train as one rank does."""
    config = config_of(line)
    expected = expected_of(line, config)
    found = run(config.mesh.sizes(), lambda mesh: train(read_only(mesh), config))
    for trained in found:
        same(trained, expected)
    cover(found, expected)


def right_or_refused(line):
    """Whether the rules allow a mix, which is right then; else a line says why not."""
    try:
        config_of(line)
    except ValueError as error:
        lines = str(error).splitlines()
        assert lines and all(" = " in one or ": " in one for one in lines), lines
        return False
    right(line)
    return True


FOUND = (
    """x=2 y=2 split='{n="x y",replicate="x"}'""",
    """x=2 y=2 split='{n="x y",own="x"}'""",
    """x=2 y=2 z=2 microbatches=2 split='{m="x y z",own="x",replicate="y"}'""",
    """x=2 y=2 d=2 zero=2 split='{m="x",n="y",replicate="x",panels="y"}'""",
    """y=2 d=3 zero=2 split='{n="y",panels="y"}'""",
    """x=2 y=2 split='{k="x y",own="y",replicate="x"}'""",
    """x=2 y=2 d=2 zero=3 scheme=3d-broadcast""",
    """x=2 y=2 d=2 zero=2 split='{n="x",k="y",own="x y"}'""",
    """x=3 y=2 d=2 zero=3 split='{m="x",n="y",own="x",panels="y"}'""",
    """x=2 y=2 d=2 zero=2 kind=bert split='{m="x",n="y"}'""",
)


@pytest.mark.parametrize("line", strided(FOUND, 3))
def test_what_was_drawn_once_and_wrong_is_right(line):
    right(f"{MODELS[0]} {line}")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "mpi"], ids="by {}".format)  # mpi is a mark
def test_the_same_on_real_ranks(transport):
    lines = [f"{MODELS[0]} schedule=none {line}" for line in FOUND]
    lines = [line for line in lines if ranks(line) == 4]
    assert len(lines) == 3
    out = checked(4, "-m", "tests.pipeline.on_mpi", transport, *lines, timeout=200)
    assert out.splitlines()[1:] == lines


@settings(max_examples=settings.default.max_examples // 10)
@given(line=mixes())
def test_a_drawn_mix_is_right_or_refused(line):
    event("right" if right_or_refused(line) else "refused")


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 10)
@given(line=mixtures())
def test_a_drawn_mixture_is_right_or_refused(line):
    event("right" if right_or_refused(line) else "refused")


@pytest.mark.slow
@given(line=mixes())
def test_many_drawn_mixes_are_right_or_refused(line):
    event("right" if right_or_refused(line) else "refused")


@pytest.mark.slow
@given(line=mixtures())
def test_many_drawn_mixtures_are_right_or_refused(line):
    event("right" if right_or_refused(line) else "refused")
