"""Memory pools count live memory, and reuse memory that has no views left."""

import ml_dtypes
import numpy as np
import pytest

from hpc3d.arrays.pool import Pool, lease_of, size_class


def test_pool_reuses_memory_after_the_last_view_is_deleted():
    pool = Pool()
    array = pool.empty((6, 4), np.float64)
    address, view = array.ctypes.data, array[2:, ::2].T
    del array
    assert pool.live["activation"] == 6 * 4 * 8
    assert lease_of(view) is not None
    del view
    assert pool.live["activation"] == 0
    assert pool.empty((4, 6), np.float64).ctypes.data == address


def test_peaks_are_tracked_by_kind_and_in_total():
    pool = Pool()
    one = pool.zeros((8,), np.float64, "parameter")
    two = pool.empty((16,), np.float32, "gradient")
    del two
    three = pool.empty((2,), np.float64, "gradient")
    assert pool.peak == {"parameter": 64, "gradient": 64, "all": 128}
    pool.reset_peak()
    assert pool.peak == {"parameter": 64, "gradient": 16, "all": 80}
    assert not one.any() and three.shape == (2,)


def test_pool_supports_types_that_numpy_does_not_define():
    block = Pool().zeros((3,), ml_dtypes.bfloat16)
    assert block.dtype == ml_dtypes.bfloat16 and block.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 64), (1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 1152)]
)
def test_size_classes_have_eight_steps_per_power_of_two(nbytes, size):
    assert size_class(nbytes) == size
