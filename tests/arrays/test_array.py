"""What every array has, all kinds of arrays have."""

import numpy as np
import pytest

from hpc3d.arrays.abstract import AbstractPool
from hpc3d.arrays.array import Array
from hpc3d.arrays.pool import Pool

ASKED = sorted(
    name
    for name in vars(Array)
    if callable(getattr(np.ndarray, name, None)) or not name.startswith("_")
)


@pytest.mark.parametrize("pool", [Pool, AbstractPool])
@pytest.mark.parametrize("name", ASKED)
def test_an_array_has_what_the_protocol_names(pool, name):
    assert hasattr(pool().empty((2, 3), np.float32), name)


def test_the_protocol_names_what_a_block_is_asked_for():
    assert {"shape", "T", "reshape", "__getitem__"} <= {*ASKED}
