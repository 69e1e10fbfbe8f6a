"""All array types implement the array protocol."""

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
def test_arrays_implement_the_array_protocol(pool, name):
    assert hasattr(pool().empty((2, 3), np.float32), name)


def test_array_protocol_includes_the_attributes_used_on_blocks():
    assert {"shape", "T", "reshape", "__getitem__"} <= {*ASKED}
