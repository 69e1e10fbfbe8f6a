"""Settings that a backend does not support are rejected."""

import re

import numpy as np
import pytest

from hpc3d.config.backend_rules import untrainable
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems
from tests.elided import elided


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--mesh.transport", "nccl"],
            "mesh.transport = nccl ... train.backend = cupy; ... auto",
        ),
        (
            ["--mesh.transport", "host-staged"],
            "mesh.transport = host-staged ... train.backend = cupy; ",
        ),
        (
            ["--train.dtype", "float64"],
            "train.dtype = float64 ... train.backend = cupy",
        ),
        (
            ["--guard.abft_every", "5"],
            "guard.abft_every = 5: ... train.back",
        ),
        (["--train.tf32", "true", "--train.dtype", "float16"], "train.tf32 = true: ... float32"),
        (
            ["--parallel.keep_dtype", "bfloat16", "--train.dtype", "float16"],
            "parallel.keep_dtype = bfloat16 ... train.dtype = float16; ... or remove the key",
        ),
        (
            ["--train.fused_gelu", "true", "--train.product_dtype", "float8"],
            "train.fused_gelu = true: ... train.product_dtype = absent; ...",
        ),
    ],
)
def test_unsupported_backend_settings_are_rejected(words, line):
    backend = "numpy" if "--mesh.transport" in words else "cupy"
    (said,) = problems("--train.backend", backend, *words)
    assert re.match(elided(line), said)


def test_torch_modules_reject_float8_products():
    first, *_ = problems("--torch.factory", "a:b", "--train.product_dtype", "float8")
    assert re.match(elided("train.product_dtype = float8: ... torch.factory = absent; ..."), first)


@pytest.mark.parametrize("backend", ["numpy", "cupy"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_types_reject_checksums(dtype, backend):
    words = "--train.backend", backend, "--train.dtype", dtype
    config = resolve(load(None, words), 1, default=True)
    assert not [*untrainable(config)]
    assert np.dtype(dtype).itemsize == 2  # which NumPy knows by ml_dtypes
    (said,) = problems(*words, "--guard.abft_every", "5")
    assert said.startswith("guard.abft_every = 5: ") and "train.dtype = float32 or float64" in said
    assert ("train.backend = numpy" in said) == (backend == "cupy")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("float16", "parallel.reduce_dtype = float16 ... float32 ... use bfloat16"),
        ("float16 --train.dtype bfloat16", "parallel.reduce_dtype = float16 ... bfloat16 ..."),
        (
            "bfloat16 --guard.abft_every 5",
            "guard.abft_every = 5: ... parallel.reduce_dtype = absent or float32; ...",
        ),
    ],
)
def test_reduce_dtype_must_hold_the_gradients(words, line):
    (said,) = problems("--parallel.reduce_dtype", *words.split())
    assert re.match(elided(line), said)


TWO = "--parallel.schedule pipedream-2bw --parallel.microbatches 2"


def test_float16_is_rejected_with_an_asynchronous_schedule():
    words = f"--train.backend cupy --train.dtype float16 {TWO}"
    (said,) = problems(*words.split())
    assert re.match(elided("train.dtype = float16: ... pipedream-2bw ... bfloat16"), said)
