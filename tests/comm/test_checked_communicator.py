"""A communicator that verifies the checksums of its messages."""

import numpy as np
import pytest

from hpc3d.comm.abft.checker import AbftChecker
from hpc3d.comm.mesh import NullRecorder
from hpc3d.comm.threads import run
from tests.comm.cases import CASES
from tests.comm.test_checker import CALLS, FAULTY, SIZE, Faulty, drawn, swap


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_checked_communicator_matches_the_unchecked_one(case):
    def rank(mesh):
        ledger = AbftChecker(mesh.rank)
        comm = ledger.wrap(mesh.comm("x"), "x")
        ledger.begin(0, NullRecorder())
        for dtype in ("float64", "float32", "int32"):
            case(comm, dtype)
        ledger.compare()
        return ledger.found

    assert run({"x": SIZE}, rank) == [[], [], []]


def test_checksums_are_recorded_only_every_n_steps():
    def rank(mesh):
        ledger, counts = AbftChecker(mesh.rank, every=3), []
        comm = ledger.wrap(mesh.comm("x"), "x")
        for number in range(7):
            ledger.begin(number, NullRecorder())
            CALLS["_all_reduce"](comm, drawn(comm, (2, 2)))
            swap(comm, drawn(comm, (2, 2)))
            counts.append((len(comm.notes), len(comm.sent)))
            ledger.compare()
            ledger.end()
        return counts

    once = [(1, 1), (0, 0), (0, 0)]
    assert run({"x": SIZE}, rank) == [[*once, *once, (1, 1)]] * SIZE


def test_message_in_flight_at_the_end_of_a_step_is_checked_in_the_next():
    def rank(mesh):
        ledger, comm = AbftChecker(mesh.rank), mesh.comm("x")
        comm = Faulty(comm, "_recv", 2) if mesh.rank == FAULTY else comm
        comm = ledger.wrap(comm, "x")
        ledger.begin(0, NullRecorder())
        comm.send(np.ones(4), (comm.rank + 1) % SIZE)
        first = ledger.compare()
        ledger.begin(1, NullRecorder())
        comm.recv((4,), np.float64, (comm.rank - 1) % SIZE).wait()
        return first, ledger.compare(), len(comm.sent), len(comm.arrived)

    assert run({"x": SIZE}, rank) == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0)]
