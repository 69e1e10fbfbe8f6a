"""Torch tensors and arrays of hpc3d that share memory, on the CPU or on a GPU.

Both refer to the same memory through DLPack, which has no rule for the bfloat16 arrays of
ml_dtypes. 16-bit floats are therefore exchanged as integers. Booleans are stored as bytes, which
all communicators support.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpc3d.arrays.narrow import is_narrow, of_type

if TYPE_CHECKING:
    from hpc3d.arrays.pool import Pool

# Types that are exchanged as integers: the type of the tensor and the name of the array's type.
_EXCHANGED = {
    torch.bfloat16: (torch.int16, "bfloat16"),
    torch.float16: (torch.int16, "float16"),
    torch.bool: (torch.uint8, "uint8"),
}


def tensor_of(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of type `dtype` that shares the memory of an array."""
    return torch.from_dlpack(array.view(np.int16) if is_narrow(array.dtype) else array).view(dtype)


def array_of(tensor: torch.Tensor, pool: Pool) -> Any:
    """Return an array that shares the memory of a contiguous tensor without a gradient.

    `pool` provides arrays on the device of the tensor.
    """
    exchanged, _ = _EXCHANGED.get(tensor.dtype, (tensor.dtype, None))
    return of_type(pool.shared(tensor.view(exchanged)).view(array_type(tensor.dtype)))


def array_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the data type of the arrays that share memory with tensors of type `dtype`."""
    if dtype in _EXCHANGED:
        return np.dtype(_EXCHANGED[dtype][1])
    return torch.empty(0, dtype=dtype).numpy().dtype


def device_of(pool: Pool) -> torch.device:
    """Return the `torch.device` that stores the arrays of a pool."""
    return torch.from_dlpack(pool.zeros((1,), np.uint8)).device
