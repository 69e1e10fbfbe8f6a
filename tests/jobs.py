"""Many cases in one MPI job. Each case is a separate test with its own time limit.

Starting ranks takes longer than most cases. The first test of a job runs all selected cases that
need the same ranks; the other tests look up their results. After a failure, another job runs the
remaining cases.
"""

from typing import NamedTuple

import pytest

from tests.mpi import mpirun
from tests.on_ranks import DONE, LIMIT


class Case(NamedTuple):
    """A case of a module that defines `case(job, transport, name)`, which all ranks call."""

    ranks: int
    transport: str
    name: str

    def __str__(self):
        return f"{self.ranks} ranks by {self.transport}: {self.name}"


OUTCOMES = pytest.StashKey[dict]()


@pytest.fixture
def run_in_job(request):
    """`run_in_job(module, case)` fails with the output of the job in which `case` failed."""

    def check(module, case, environment=None):
        known = request.config.stash.setdefault(OUTCOMES, {})
        test = request.node.nodeid.partition("[")[0]
        if (test, case) not in known:
            outcomes = outcomes_of(module, together(request, test, case), environment)
            known |= {(test, each): error for each, error in outcomes.items()}
        if error := known[test, case]:
            pytest.fail(error, pytrace=False)

    return check


def together(request, test, case):
    """The selected cases of the same test that need the same job."""
    items = [item for item in request.session.items if item.nodeid.partition("[")[0] == test]
    cases = [item.callspec.params["case"] for item in items]
    return [each for each in cases if each[:2] == case[:2]]


def outcomes_of(module, cases, environment=None):
    """The error text of each case, which is empty if it passed."""
    found, left = {}, [*cases]
    while left:
        ranks, transport, _ = left[0]
        words = "-m", "tests.on_ranks", module, transport, *(case.name for case in left)
        limit = 60 + LIMIT * len(left)
        done = mpirun(ranks, *words, timeout=limit, environment=environment)
        passed = done.stdout.count(DONE)
        found |= dict.fromkeys(left[:passed], "")
        if passed < len(left):
            found[left[passed]] = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        left = left[passed + 1 :]
    return found
