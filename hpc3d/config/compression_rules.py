"""The rules of compressed gradients: what goes together with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def wrong_compression(config: Config) -> Iterator[str]:
    """Where no gradients can be compressed, and keys of another kind of compression."""
    parallel, train = config.parallel, config.train
    key = f"parallel.compression = {parallel.compression}"
    yield from _unused(config)
    if parallel.compression == "none":
        return
    if parallel.zero > 1:
        yield (
            f"{key}: with parallel.zero = {parallel.zero} no rank has a whole gradient to "
            "compress; use parallel.zero = 0 or 1"
        )
    if train.dtype == "float16":
        yield (
            f"{key}: what waits for the next step would have the loss scale of this one; use "
            "train.dtype = bfloat16 or float32"
        )
    if train.cuda_graph:
        yield f"{key}: no CUDA graph records it; use train.cuda_graph = false"


def _unused(config: Config) -> Iterator[str]:
    """Keys that have a meaning with one kind of compression alone."""
    parallel = config.parallel
    for key, kind in (("compression_rank", "powersgd"), ("compression_share", "top-k")):
        value = getattr(parallel, key)
        if value != getattr(type(parallel), key) and parallel.compression != kind:
            yield f"parallel.{key} = {value}: of parallel.compression = {kind}; leave it out"
