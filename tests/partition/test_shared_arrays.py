"""Tensors and arrays that share memory."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hpc3d.arrays.pool import Pool
from hpc3d.partition.shared_arrays import array_of, array_type, device_of, tensor_of
from tests.fakes.fake_device import DevicePool

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("kind", [Pool, DevicePool])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 2), (0,), ()])
def test_tensor_and_array_share_memory(kind, dtype, shape):
    if dtype == torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    pool = kind()
    array = pool.zeros(shape, array_type(dtype))
    tensor = tensor_of(array, dtype)
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
    tensor.fill_(1)
    assert (np.asarray(array) == 1).all()
    again = array_of(tensor, pool)
    assert (again.dtype, again.shape, type(again)) == (array.dtype, shape, type(array))
    again.fill(0)
    assert not tensor.any()


def test_arrays_of_the_host_are_on_torchs_cpu():
    assert device_of(Pool()) == torch.device("cpu")
