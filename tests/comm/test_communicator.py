"""The protocol of communicators on every implementation, against NumPy on the gathered data."""

import pytest

from hpc3d.comm.communicator import Self
from tests.comm.cases import CASES
from tests.mpi import checked


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_self(case):
    case(Self(), "float64")


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("auto", "SharedMemory"),
        pytest.param("mpi", "MpiCommunicator", marks=pytest.mark.slow),
    ],
)
def test_real_ranks(transport, kind, ranks):
    out = checked(ranks, "-m", "tests.comm.on_mpi", transport, timeout=200)
    larger = [word for size in range(2, ranks + 1) for word in (str(size), kind)]
    assert out.split() == ["1", "Self", *larger]
