"""What the backends of the input file, numpy and cupy, have and have not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from hpc3d.extras import lacking
from hpc3d.model.families import family_of
from hpc3d.pipeline.schedule import find

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

NARROW = "float16", "bfloat16"


def wrong_backend(config: Config) -> Iterator[str]:
    """What one backend has and the other has not."""
    train, transport = config.train, config.mesh.transport
    if train.backend == "numpy" and transport in ("nccl", "host-staged"):
        yield f"mesh.transport = {transport}: for GPUs, train.backend = cupy; use auto or mpi"
    if train.tf32 and (train.backend, train.dtype) != ("cupy", "float32"):
        yield "train.tf32 = true: for train.backend = cupy with dtype = float32; use false"
    yield from _wrong_graph(config)
    model, gated = config.model, family_of(config.model).gated
    if train.fused_gelu and (train.backend, gated, model.gelu) != ("cupy", False, "tanh"):
        yield (
            "train.fused_gelu = true: for train.backend = cupy, model.kind = gpt2 or bert and "
            "model.gelu = tanh; use false"
        )
    if train.fused_gelu and train.product_dtype:
        yield (
            f"train.fused_gelu = true: nothing is fused to products of {train.product_dtype}; use "
            "false"
        )
    if config.torch.factory and train.product_dtype:
        yield f"train.product_dtype = {train.product_dtype}: not for torch modules; leave it out"
    if train.backend == "cupy" and train.dtype == "float64":
        yield "train.dtype = float64: train.backend = cupy has no kernels for it; use float32"
    if train.backend == "cupy" and config.guard.abft_every:
        yield (
            f"guard.abft_every = {config.guard.abft_every}: not there yet for "
            "train.backend = cupy; use 0, and guard.replicas_every"
        )
    yield from _wrong_types(config)
    if train.backend == "cupy" and config.trace.clock == "cpu":
        yield "trace.clock = cpu: a GPU has no CPU time; use wall"
    if train.backend == "numpy" and config.trace.nvtx:
        yield "trace.nvtx = true: for train.backend = cupy; use false"


def _wrong_types(config: Config) -> Iterator[str]:
    """Types of numbers that are not known here, that do not fit, or that save nothing."""
    dtype, keep_dtype = config.train.dtype, config.parallel.keep_dtype
    types = {"train.dtype": dtype, "parallel.keep_dtype": keep_dtype}
    types |= {"parallel.reduce_dtype": config.parallel.reduce_dtype}
    for key, value in types.items():
        if value in ("bfloat16", "float8") and not known("ml_dtypes"):
            yield f"{key} = {value}: needs ml_dtypes: python -m pip install ml_dtypes"
    if keep_dtype == "bfloat16" and dtype in NARROW:
        yield (
            f"parallel.keep_dtype = bfloat16: train.dtype = {dtype} has as few bits; use int8, or "
            "leave it out"
        )
    yield from _wrong_sums(config)


def _wrong_sums(config: Config) -> Iterator[str]:
    """Sums over ranks of floats of 16 bits that are not there, or lose what they sum."""
    dtype, parallel, guard = config.train.dtype, config.parallel, config.guard
    reduced = parallel.reduce_dtype
    for key, value in {"train.dtype": dtype, "parallel.reduce_dtype": reduced}.items():
        if value in NARROW and guard.abft_every and config.train.backend == "numpy":
            yield (
                f"guard.abft_every = {guard.abft_every}: not there yet for {key} = {value}; use "
                "0, and guard.replicas_every"
            )
    if reduced == "float16" and dtype != "float16":
        yield (
            f"parallel.reduce_dtype = float16: small gradients are 0 in it, where train.dtype = "
            f"{dtype} scales no loss; use bfloat16, or train.dtype = float16"
        )
    if reduced and parallel.zero > 1:
        yield (
            f"parallel.reduce_dtype = {reduced}: with parallel.zero = {parallel.zero} gradients "
            "cross d as train.dtype has them; use parallel.zero = 1"
        )


def _wrong_graph(config: Config) -> Iterator[str]:
    """Where a step cannot be one launch."""
    from hpc3d.cuda.cudnn_attention import Flash

    if not config.train.cuda_graph:
        return
    if config.train.backend != "cupy":
        yield "train.cuda_graph = true: for train.backend = cupy; use false"
    if config.mesh.p > 1:
        yield (
            f"train.cuda_graph = true: with mesh.p = {config.mesh.p} stages send messages, which "
            "are not recorded; use train.cuda_graph = false, or mesh.p = 1"
        )
    if config.context().rings > 1:
        yield (
            f"train.cuda_graph = true: with mesh.c = {config.mesh.c} and parallel.context = "
            f"{config.parallel.context} keys and values are sent in messages, which are not "
            "recorded; use train.cuda_graph = false, or parallel.context = all-to-all"
        )
    if find(config.parallel.schedule or "none").asynchronous:
        yield (
            f"train.cuda_graph = true: under schedule {config.parallel.schedule} steps differ in "
            "their weights; use train.cuda_graph = false, or a schedule that is synchronous"
        )
    whole = config.train.dtype != "float32" and not config.chunked()
    if whole and not Flash.replays(config.model.sequence):
        yield (
            "train.cuda_graph = true: cuDNN's attention on model.sequence = "
            f"{config.model.sequence} cannot be replayed; use a multiple of 128, or "
            "train.cuda_graph = false"
        )


def known(package: str) -> bool:
    """Whether a package is here; then it is loaded, and NumPy knows the types that it brings."""
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def untrainable(config: Config) -> Iterator[str]:
    """What can be simulated, but needs a package to be trained."""
    if (config.train.backend, config.model.gelu) == ("numpy", "exact"):
        yield from lacking("model.gelu = exact", "scipy")
