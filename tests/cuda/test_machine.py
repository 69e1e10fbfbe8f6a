"""The kernel emulator detects errors that would be undefined behavior on a GPU."""

import numpy as np
import pytest

from hpc3d.cuda.launch_table import Launch
from tests.cuda.conftest import REALS
from tests.cuda.emulator import Fault, program

FAULTS = """
#include "common.cuh"

__global__ void right(const float* x, float* y)
{
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = warp_all<Sum>(all[63 - threadIdx.x]);
}

__global__ void no_barrier(const float* x, float* y)
{
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = all[63 - threadIdx.x];
}

__global__ void barrier_of_some(const float* x, float* y)
{
    if (threadIdx.x < 40)
        __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}

__global__ void barriers_apart(const float* x, float* y)
{
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}

__global__ void exchange_of_some(const float* x, float* y)
{
    if (threadIdx.x != 5)
        y[threadIdx.x] = warp_all<Sum>(x[threadIdx.x]);
}

__global__ void read_behind(const float* x, float* y)
{
    y[threadIdx.x] = x[threadIdx.x + 1];
}

__global__ void write_before(const float* x, float* y)
{
    y[static_cast<int>(threadIdx.x) - 1] = x[threadIdx.x];
}

__global__ void not_aligned(const float* x, float* y)
{
    *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(x + 1);
}

__global__ void blocks_together(const float* x, float* y) { y[threadIdx.x] += x[threadIdx.x]; }

__global__ void not_written(const float* x, float* y)
{
    __shared__ float all[64];
    if (x[threadIdx.x] < 0)
        all[threadIdx.x] = 1;
    y[threadIdx.x] = x[threadIdx.x] + all[threadIdx.x];
}
"""

FOUND = {
    "no_barrier": "races with another one for a place in the shared memory",
    "barrier_of_some": "not reached by all threads",
    "barriers_apart": "not reached by all threads at the same place",
    "exchange_of_some": "not reached by all threads",
    "read_behind": r"thread \(63, 0\) of block \(0, 0\) reads 4 bytes outside of all arrays",
    "write_before": r"thread \(0, 0\) of block \(0, 0\) writes 4 bytes outside of all arrays",
    "not_aligned": "reads 16 bytes that are not aligned",
    "blocks_together": "races with another one for a place in y",
}
OTHERS = ["right", "not_written"]


@pytest.fixture(scope="module")
def faults(library_of):
    return library_of({"faults": program(FAULTS, [*FOUND, *OTHERS])})


def arrays():
    x = REALS[0].cast(np.arange(64, dtype=np.float32))
    return {"x": x, "y": REALS[0].empty(64)}


@pytest.mark.parametrize("name", FOUND)
def test_emulator_detects_a_planted_fault(name, faults):
    with pytest.raises(Fault, match=FOUND[name]):
        faults.run(name, Launch((2, 1), (64, 1)), arrays())


def test_correct_kernel_runs_and_shared_memory_is_not_preserved(faults):
    given = arrays()
    faults.run("right", Launch((1, 1), (64, 1)), given)
    halves = given["x"].reshape(2, 32).sum(1)
    np.testing.assert_array_equal(given["y"], np.repeat(halves[::-1], 32))
    faults.run("not_written", Launch((1, 1), (64, 1)), given)
    assert np.isnan(given["y"]).all()


TINY = np.finfo(np.float32).tiny
EDGES = [0.0, -0.0, 1.0, -3.3, 65519.996, 65520.0, 1e9, 2**-24, 2**-25, 3 * 2**-25, 2**-14, np.inf]


@pytest.mark.parametrize("real", REALS[1:], ids=lambda real: real.name)
def test_16_bit_conversion_rounds_as_in_numpy(real, emulate):
    with np.errstate(over="ignore"):
        bits = np.random.default_rng(3).integers(0, 2**32, 4000, dtype=np.uint32)
        x = np.concatenate([np.float32(EDGES), bits.view(np.float32)])
        x = x[(x == 0) | (np.abs(x) >= TINY) | np.isnan(x)]  # CuPy compiles with -ftz=true
        expected = real.cast(x)
    zeros = np.zeros((1, x.size), np.float32)
    factors = np.float32([0, 1])
    value = real.empty(x.size)
    given = {"master": x.copy(), "grad": zeros, "factors": factors, "size": x.size}
    emulate("descend", 1, x.size, value=value, **given)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(value[number].view(np.uint16), expected[number].view(np.uint16))
    assert np.isnan(real.back(value)[~number]).all()
