"""Validation rules for the NumPy and CuPy backends and for data types."""

from __future__ import annotations

from collections.abc import Iterator

from hpc3d.config.input_file import Config
from hpc3d.config.wrong_values import reported
from hpc3d.runtime.optional_packages import lacking


def wrong_backend(config: Config) -> Iterator[str]:
    """Report a transport or data type that the backend does not support."""
    yield from reported(_wrong_transport(config), _wrong_types(config))


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


def untrainable(config: Config) -> Iterator[str]:
    """Report settings that require a missing optional package for training, not for simulation."""
    if (config.train.backend, config.model.gelu) == ("numpy", "exact"):
        yield from lacking("model.gelu = exact", "scipy")
