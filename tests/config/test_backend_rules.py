"""What a backend cannot do is refused."""

import re

import numpy as np
import pytest

from hpc3d.config import backend_rules
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.load import load
from hpc3d.config.rules import resolve
from tests.config.refused import problems
from tests.elided import elided


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--mesh.transport", "nccl"],
            "mesh.transport = nccl: ... train.backend = cupy; ... auto",
        ),
        (["--mesh.transport", "host-staged"], "mesh.transport = host-staged: for GPUs"),
        (
            ["--train.dtype", "float64"],
            "train.dtype = float64: train.backend = cupy",
        ),
        (
            ["--guard.abft_every", "5"],
            "guard.abft_every = 5: ... train.back",
        ),
        (["--train.tf32", "true", "--train.dtype", "float16"], "train.tf32 = true: ... float32"),
        (
            ["--parallel.keep_dtype", "bfloat16", "--train.dtype", "float16"],
            "parallel.keep_dtype = bfloat16: train.dtype = float16 ... int8, or leave it out",
        ),
    ],
)
def test_what_a_backend_has_not_is_refused(words, line):
    backend = "numpy" if "--mesh.transport" in words else "cupy"
    (said,) = problems("--train.backend", backend, *words)
    assert re.match(elided(line), said)


def test_numbers_of_16_bits_are_for_gpus_and_simulations():
    for dtype in ("float16", "bfloat16"):
        config = resolve(load(None, ["--train.dtype", dtype]), 1, default=True)
        (said,) = untrainable(config)
        assert re.match(elided(f"train.dtype = {dtype}: ... float32"), said)
        assert np.dtype(dtype).itemsize == 2  # which NumPy knows by ml_dtypes
    assert not [
        *untrainable(
            resolve(load(None, ["--train.backend", "cupy", "--train.dtype", dtype]), 1, True)
        )
    ]


def test_bfloat16_needs_a_package(monkeypatch):
    monkeypatch.setattr(backend_rules, "known", lambda package: False)
    (said,) = problems("--train.dtype", "bfloat16")
    assert re.match("train.dtype = bfloat16: .* python -m pip install ml_dtypes$", said)


TWO = "--parallel.schedule pipedream-2bw --parallel.microbatches 2"


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (f"--train.cuda_graph true {TWO}", "train.cuda_graph = true: ... pipedream-2bw ... false"),
        (f"--train.dtype float16 {TWO}", "train.dtype = float16: ... pipedream-2bw ... bfloat16"),
        (
            "--train.cuda_graph true --train.dtype bfloat16",
            "train.cuda_graph = true: ... 64 ... 128",
        ),
        (
            "--train.cuda_graph true --mesh.c 2 --train.dtype float32",
            "train.cuda_graph = true: ... mesh.c = 2 ... all-to-all",
        ),
    ],
)
def test_what_a_gpu_cannot_do_with_a_schedule_is_refused(how, line):
    (said,) = problems("--train.backend", "cupy", *how.split())
    assert re.match(elided(line), said)
