"""Validation rules for the NumPy and CuPy backends and for data types."""

from __future__ import annotations

from collections.abc import Iterator

from hpc3d.config.input_file import Config
from hpc3d.config.wrong_values import reported
from hpc3d.runtime.optional_packages import lacking


def wrong_backend(config: Config) -> Iterator[str]:
    """Report a transport, data type or CUDA graph setting that the backend does not support."""
    yield from reported(_wrong_transport(config), _wrong_types(config), _wrong_graph(config))


def _wrong_transport(config: Config) -> Iterator[str]:
    backend, transport = config.train.backend, config.mesh.transport
    if backend == "numpy" and transport in ("nccl", "host-staged"):
        yield f"mesh.transport = {transport} requires train.backend = cupy; use auto or mpi"
    if backend == "cupy" and config.train.dtype == "float64":
        yield "train.dtype = float64 is not supported by train.backend = cupy; use float32"


def _wrong_types(config: Config) -> Iterator[str]:
    """Report data types that save no memory or round gradients to 0."""
    dtype, kept = config.train.dtype, config.parallel.keep_dtype
    reduced = config.parallel.reduce_dtype
    if kept == "bfloat16" and dtype in ("float16", "bfloat16"):
        key = f"parallel.keep_dtype = bfloat16 saves no memory with train.dtype = {dtype}"
        yield f"{key}; use int8, or remove the key"
    if reduced == "float16" and dtype != "float16":
        why = f"because train.dtype = {dtype} has no loss scaling"
        key = f"parallel.reduce_dtype = float16 rounds small gradients to 0, {why}"
        yield f"{key}; use bfloat16, or train.dtype = float16"


def _wrong_graph(config: Config) -> Iterator[str]:
    """Report settings that prevent a training step from being captured as one CUDA graph."""
    from hpc3d.cuda.cudnn_attention import Flash

    if not config.train.cuda_graph:
        return
    key, c, parallel = "train.cuda_graph = true", config.mesh.c, config.parallel
    if config.context().rings > 1:
        yield (
            f"{key}: a CUDA graph cannot capture the messages of ring attention (mesh.c = {c}, "
            f"parallel.context = {parallel.context}); use parallel.context = all-to-all, or set "
            "train.cuda_graph = false"
        )
        return
    model = config.model
    if model.experts and not model.capacity:
        yield (
            f"{key}: with model.capacity = 0, the number of slots depends on the routing, which a "
            f"CUDA graph cannot capture; use model.capacity = {model.experts / model.top_k:g}, "
            "which drops no tokens either, or set train.cuda_graph = false"
        )
    length = model.sequence
    if config.train.dtype != "float32" and not Flash.replays(length):
        key += f": model.sequence = {length} must be a multiple of 128"
        yield f"{key}; change the length, or set train.cuda_graph = false"


def untrainable(config: Config) -> Iterator[str]:
    """Report settings that require a missing optional package for training, not for simulation."""
    if (config.train.backend, config.model.gelu) == ("numpy", "exact"):
        yield from lacking("model.gelu = exact", "scipy")
