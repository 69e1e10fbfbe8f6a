"""What a backend cannot do is refused."""

import numpy as np
import pytest

from hpc3d.config import backend_rules
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.load import load
from hpc3d.config.rules import settle
from tests.config.refused import problems


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--mesh.transport", "nccl"],
            "mesh.transport = nccl: for GPUs, train.backend = cupy; use",
        ),
        (["--mesh.transport", "staged"], "mesh.transport = staged: for GPUs"),
        (
            ["--train.dtype", "float64"],
            "train.dtype = float64: train.backend = cupy has no kernels",
        ),
        (
            ["--guard.products_every", "5"],
            "guard.products_every = 5: not there yet for train.back",
        ),
        (["--train.tf32", "true", "--train.dtype", "float16"], "train.tf32 = true: for train."),
    ],
)
def test_what_a_backend_has_not_is_refused(words, line):
    backend = "numpy" if "--mesh.transport" in words else "cupy"
    (said,) = problems("--train.backend", backend, *words)
    assert said.startswith(line)


def test_numbers_of_16_bits_are_for_gpus_and_simulations():
    for dtype in ("float16", "bfloat16"):
        config = settle(load(None, ["--train.dtype", dtype]), 1, default=True)
        (said,) = untrainable(config)
        assert said.startswith(f"train.dtype = {dtype}: processors are slow at it; use float32")
        assert np.dtype(dtype).itemsize == 2  # which NumPy knows by ml_dtypes
    assert not [
        *untrainable(
            settle(load(None, ["--train.backend", "cupy", "--train.dtype", dtype]), 1, True)
        )
    ]


def test_bfloat16_needs_a_package(monkeypatch):
    monkeypatch.setattr(backend_rules, "known", lambda package: False)
    (said,) = problems("--train.dtype", "bfloat16")
    assert said.startswith("train.dtype = bfloat16: needs ml_dtypes: python -m pip install")


TWO = "--parallel.schedule pipedream-2bw --parallel.microbatches 2"


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (f"--train.graph true {TWO}", "train.graph = true: under schedule pipedream-2bw steps"),
        (f"--train.dtype float16 {TWO}", "train.dtype = float16: under schedule pipedream-2bw no"),
        ("--train.graph true --train.dtype bfloat16", "train.graph = true: cuDNN's attention on"),
    ],
)
def test_what_a_gpu_cannot_do_with_a_schedule_is_refused(how, line):
    (said,) = problems("--train.backend", "cupy", *how.split())
    assert said.startswith(line)
