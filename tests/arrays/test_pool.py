"""A pool counts what is live, and hands memory out again when its last view has died."""

import ml_dtypes
import numpy as np
import pytest

from hpc3d.arrays.pool import Pool, lease_of, size_class


def test_memory_comes_back_with_its_last_view():
    pool = Pool()
    array = pool.empty((6, 4), np.float64)
    address, view = array.ctypes.data, array[2:, ::2].T
    del array
    assert pool.live["activation"] == 6 * 4 * 8
    assert lease_of(view) is not None
    del view
    assert pool.live["activation"] == 0
    assert pool.empty((4, 6), np.float64).ctypes.data == address


def test_peaks_are_of_each_kind_and_of_all_at_one_time():
    pool = Pool()
    one = pool.zeros((8,), np.float64, "parameter")
    two = pool.empty((16,), np.float32, "gradient")
    del two
    three = pool.empty((2,), np.float64, "gradient")
    assert pool.peak == {"parameter": 64, "gradient": 64, "all": 128}
    pool.reset_peak()
    assert pool.peak == {"parameter": 64, "gradient": 16, "all": 80}
    assert not one.any() and three.shape == (2,)


def test_a_type_that_numpy_does_not_name_is_kept():
    block = Pool().zeros((3,), ml_dtypes.bfloat16)
    assert block.dtype == ml_dtypes.bfloat16 and block.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 64), (1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 1152)]
)
def test_memory_has_eight_sizes_a_power_of_two(nbytes, size):
    assert size_class(nbytes) == size
