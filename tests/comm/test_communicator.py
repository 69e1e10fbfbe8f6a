"""The communicator protocol in all implementations, compared with NumPy on the gathered data."""

import pytest

from hpc3d.comm.communicator import EXCHANGES, Self, received_bytes, received_share
from tests.comm.cases import CASES
from tests.mpi import checked


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_self_communicator(case):
    case(Self(), "float64")


@pytest.mark.parametrize("op", EXCHANGES)
def test_received_bytes_are_a_share_of_the_full_array(op):
    block = 96 // 4 if op == "all_gather" else 96
    assert received_bytes(op, block, 4) == 96 * received_share(op, 4)


@pytest.mark.parametrize(("op", "received"), [("broadcast", [8, 0, 8]), ("reduce", [8, 8, 0])])
def test_root_receives_no_bytes(op, received):
    assert [received_bytes(op, 8, 3, place, root=1) for place in range(3)] == received
    assert received_bytes(op, 8, 3) == 8


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("auto", "SharedMemory"),
        pytest.param("mpi", "AllPairs MPI", marks=pytest.mark.slow),
    ],
)
def test_communicators_on_mpi_ranks(transport, kind, ranks):
    out = checked(ranks, "-m", "tests.comm.on_mpi", transport, timeout=200)
    assert out.splitlines() == ["1 Self", *(f"{size} {kind}" for size in range(2, ranks + 1))]
