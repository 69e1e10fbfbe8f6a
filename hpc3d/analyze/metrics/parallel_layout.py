"""Effective parallel layout of a run, which depends on the mesh and the scheme.

A scheme shards the loop dimensions m, n and k of its matrix products along mesh axes. A dimension
is not sharded if its mesh axes have a single rank. For example, the 3-D scheme on x=16 y=4 z=1
shards only m and n, like a 2-D scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.comm.mesh import CONTEXT, COPIES, DATA
from hpc3d.trace.reader import Trace

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

_DATA = {COPIES, DATA, CONTEXT}


class RunLayout(NamedTuple):
    """Parallel layout of a run.

    Attributes
    ----------
    kind
        Scheme, schedule and other techniques, such as "3d, 1f1b"; "" for a single rank. If some
        loop dimensions are not sharded on this mesh, the sharded ones are listed: "3d (shards only
        m), 1f1b".
    family
        Dimensionality of the tensor parallelism (1d, 2d, 2.5d or 3d, determined by the sharded
        loop dimensions), or None if there is no tensor parallelism.
    sizes
        Number of ranks along each mesh axis.
    """

    kind: str
    family: str | None
    sizes: dict

    @property
    def label(self) -> str:
        """Return the kind and mesh sizes as text, such as "3d, 1f1b, p=2 x=2 y=2 z=2"."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return ", ".join(part for part in (self.kind, mesh or "1 rank") if part)


def layout_of(trace: Trace) -> RunLayout:
    """Return the layout of a run. If its configuration is unknown, `kind` is the run id."""
    sizes = dict(zip(trace.attrs["axes"].split(), trace.attrs["axis_sizes"]))
    config = configuration(trace)
    if config is None:
        return RunLayout(trace.attrs["run_id"], None, sizes)
    return configured_layout(config, sizes)


def configured_layout(config: Config, sizes: Mapping[str, int]) -> RunLayout:
    """Return the layout of a run with the given configuration and `sizes` of the mesh axes."""
    wide = {axis for axis, size in sizes.items() if size > 1}
    sharded = [loop for loop, axes in _tensor_axes(config).items() if axes & wide]
    return RunLayout(_kind(config, sharded, wide), _family(config, sharded, wide), {**sizes})


def _tensor_axes(config):
    """Return a dict from each sharded loop dimension to the tensor-parallel axes that shard it."""
    split = config.splits["dense"]
    axes = {loop: {*getattr(split, loop).split()}.difference(_DATA) for loop in "mnk"}
    return {loop: names for loop, names in axes.items() if names}


def _kind(config, sharded, wide):
    """Describe the scheme, schedule, context parallelism and ZeRO stage.

    Techniques are omitted if their mesh axes have a single rank.
    """
    parallel, parts = config.parallel, []
    if sharded:
        name = "split" if parallel.split else parallel.scheme
        complete = len(sharded) == len(_tensor_axes(config))
        parts.append(name if complete else f"{name} (shards only {' and '.join(sharded)})")
    if "p" in wide:
        parts.append(parallel.schedule or "pipeline")
    if "c" in wide:
        parts.append(f"context {parallel.context}")
    if wide & _DATA and (parallel.zero or not parts):
        parts.append(f"ZeRO {parallel.zero}" if parallel.zero else "data parallel")
    return ", ".join(parts)


def _family(config, sharded, wide):
    """Return the dimensionality of the tensor parallelism, such as "2d", or `None` without TP.

    The dimensionality is the number of sharded loop dimensions. Sharding only m is data
    parallelism, not tensor parallelism.
    """
    split = config.splits["dense"]
    deep = {*split.replicate.split()} & {*split.m.split()} & wide - _DATA
    if sharded in ([], ["m"]):
        return None
    return "2.5d" if len(sharded) == 2 and deep else f"{len(sharded)}d"
