"""Random numbers of a stream, compared with NumPy's generator for this stream."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpc3d.ops.random import keep_mask, philox_draws, philox_key

KEY = philox_key("a stream")


def drawn_by_numpy(first, count):
    stream = np.random.Philox(key=KEY, counter=first // 4)
    return stream.random_raw(first % 4 + count)[first % 4 :]


@pytest.mark.parametrize("first", [0, 1, 4, 7, 123_457, 2**40 + 2])
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_philox_draws_match_numpy_from_any_offset(first, count):
    np.testing.assert_array_equal(philox_draws(KEY, first, count), drawn_by_numpy(first, count))


def test_philox_draws_are_thread_safe():
    whole = drawn_by_numpy(0, 40_000)

    def agree(first):
        return all(
            (philox_draws(KEY, n, 9) == whole[n : n + 9]).all() for n in range(first, 39_990, 8)
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(agree, range(8)))


def test_mask_without_rows_is_empty():
    mask = keep_mask(KEY, 0.5, range(3, 3), range(2, 7), 8)
    assert mask.shape == (0, 5) and mask.dtype == bool
