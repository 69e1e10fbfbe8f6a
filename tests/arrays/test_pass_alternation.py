"""Two passes that take turns at each switch, with their own values of the state of a pass."""

import contextvars
from types import SimpleNamespace

import pytest

from hpc3d.arrays.pass_alternation import PassAlternation


def logged(name, passes, log, owner, switches, error=None):
    """Return a pass that appends its state to `log` before each switch, and checks it after."""

    def run():
        for number in range(switches):
            owner.layer = f"{name}{number}"
            log.append(owner.layer)
            passes.switch()
            assert owner.layer == f"{name}{number}"
        log.append(f"end of {name}")
        if error:
            raise error

    return run


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((2, 2), "a0 b0 a1 b1 end of a end of b"),
        ((1, 3), "a0 b0 end of a b1 b2 end of b"),
        ((3, 1), "a0 b0 a1 end of b a2 end of a"),
        ((0, 1), "end of a b0 end of b"),
        ((2, 0), "a0 end of b a1 end of a"),
    ],
)
def test_passes_alternate_until_one_ends(counts, expected):
    log, owner = [], SimpleNamespace(layer=-1)
    passes = PassAlternation(owner, ["layer"])
    for _ in range(2):
        first, second = (
            logged(name, passes, log, owner, count)
            for name, count in zip("ab", counts, strict=True)
        )
        passes.run(first, second)
        assert " ".join(log) == expected
        assert owner.layer == -1
        log.clear()


def test_a_pass_begins_with_the_state_before_the_pair_and_its_context():
    owner, found = SimpleNamespace(layer=-1), []
    passes = PassAlternation(owner, ["layer"])
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")

    def first():
        owner.layer = 3
        passes.switch()

    passes.run(first, lambda: found.append((owner.layer, variable.get())))
    assert found == [(-1, "set")]


def test_switch_outside_of_a_pair_has_no_effect():
    PassAlternation(None, []).switch()


@pytest.mark.parametrize("which", [0, 1])
def test_error_of_a_pass_ends_the_pair(which):
    log, owner = [], SimpleNamespace(layer=-1)
    passes = PassAlternation(owner, ["layer"])
    errors = [ValueError("a"), None] if which == 0 else [None, ValueError("b")]
    first, second = (
        logged(name, passes, log, owner, 1, error)
        for name, error in zip("ab", errors, strict=True)
    )
    with pytest.raises(ValueError, match="ab"[which]):
        passes.run(first, second)
    assert passes.other is None
    passes.switch()
