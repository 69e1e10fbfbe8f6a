"""A finding is printed as one line and its remedy."""

from hpc3d.runtime.finding import FAIL, OK, WARN, Finding, examine
from tests.diagnose.planted import verdicts


def test_finding_prints_a_line_and_its_remedy():
    lines = Finding(FAIL, "MPI", "is broken", "repair it\nor not").lines()
    assert lines == ["FAIL  MPI: is broken", "      -> repair it", "      -> or not"]
    assert Finding(OK, "MPI", "works").lines() == ["ok    MPI: works"]


def test_check_that_raises_becomes_a_finding():
    def some_thing():
        yield Finding(OK, "a", "b")
        raise KeyError("c")

    assert verdicts(examine(some_thing)) == [(OK, "a"), (WARN, "some thing")]
