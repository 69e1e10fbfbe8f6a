"""Launch parameters of each kernel."""

import re

import numpy as np
import pytest

from hpc3d.cuda import launch_table

KERNELS = launch_table.kernels()


def test_launch_table_lists_every_kernel():
    for path in launch_table.FOLDER.glob("*.cu"):
        declared = re.findall(r"__global__[^;{]*?(\w+)\(\s*\w[^()]*\)\s*{", path.read_text())
        assert declared == [name for name, k in KERNELS.items() if k.source == path.stem]


def test_kernel_signature_is_parsed():
    kernel = KERNELS["accumulate"]
    assert kernel.parameters == {"grad": "float*", "dw": "const T*", "size": "long long"}
    assert kernel.instances == [f"accumulate<{real}>" for real in launch_table.REALS.values()]
    assert (kernel.source, kernel.threads) == ("rows", 256)
    assert KERNELS["sum_strips"].instances == ["sum_strips"]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("size", [(1, 1), (70000, 5), (3, 50257), (64, 4096)])
def test_launch_configuration_is_valid_in_cuda(name, size):
    kernel, (rows, columns) = KERNELS[name], size
    sums = min(rows, 2) if name == "sum_strips" else rows
    (x, y), block = kernel.launch("float16", sums, columns)
    assert 0 < x < 2**31
    assert 0 < y <= 65535
    threads = block[0] * block[1]
    assert 0 < threads <= kernel.threads
    assert threads % launch_table.WARP == 0


@pytest.mark.parametrize(
    ("name", "size", "grid", "block"),
    [
        ("moments", (8, 1000), (8, 1), (128, 1)),
        ("moments", (8, 8000), (8, 1), (256, 1)),
        ("cross_entropy", (8, 50257), (8, 1), (512, 1)),
        ("add", (1, 2049), (2, 1), (256, 1)),
        ("add", (1, 10**9), (launch_table.BLOCKS, 1), (256, 1)),
        ("sum_rows", (129, 257), (2, 3), (32, 8)),
        ("sum_rows", (10**6, 256), (1, launch_table.STRIPS), (32, 8)),
        ("sum_strips", (2, 65), (3, 2), (32, 8)),
        ("scatter_rows", (9, 257), (9, 2), (32, 1)),
        ("causal_softmax", (24, 65), (24, 2), (8, 32)),
        ("dropped", (2, 513), (2, 1), (64, 1)),
        ("sum_parts", (1, 33), (1, 1), (64, 1)),
        ("combine_moments", (257, 1), (2, 1), (256, 1)),
    ],
)
def test_launch_configurations(name, size, grid, block):
    assert KERNELS[name].launch("float16", *size) == (grid, block)


def bound(**changed):
    given = {"grad": np.zeros(3, np.float32), "dw": np.zeros(3, np.float16), "size": 3}
    return KERNELS["accumulate"].bind(lambda array: array.dtype.name, {**given, **changed})


def test_arguments_are_converted_to_the_parameter_types():
    real, (grad, dw, size) = bound()
    assert (real, grad.dtype, dw.dtype, size.dtype) == ("float16", "f4", "f2", "i8")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"grad": np.zeros(3)}, "grad must be float32"),
        ({"dw": np.zeros(3)}, "float64"),
        ({"sizes": 3}, "accumulate"),
    ],
)
def test_invalid_kernel_argument_is_rejected(changed, said):
    with pytest.raises((AssertionError, KeyError), match=said):
        bound(**changed)
