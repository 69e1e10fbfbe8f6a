"""How a run shared out its work: what was really cut, which is not always what its scheme could.

A scheme cuts the loops m, n and k of its products along axes.  Where such an axis has one rank,
its loop is whole: 3-D on x=16 y=4 z=1 cuts m and n, as 2-D does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.comm.mesh import CONTEXT, DATA

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace

_DATA = {DATA, CONTEXT}


class RunLayout(NamedTuple):
    """The layout of a run: its `kind`, such as "3d, 1f1b", or "" on one rank; the `family` of its
    tensor parallelism (1d, 2d, 2.5d or 3d: the loops that are cut), None without any; and the
    `sizes` of the mesh axes."""

    kind: str
    family: str | None
    sizes: dict

    @property
    def label(self) -> str:
        """Kind and sizes: "3d, 1f1b, p=2 x=2 y=2 z=2"."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return ", ".join(part for part in (self.kind, mesh or "1 rank") if part)


def layout_of(trace: Trace) -> RunLayout:
    """The RunLayout of a run; without a configuration its kind is the run's id."""
    sizes = dict(zip(trace.attrs["axes"].split(), trace.attrs["axis_sizes"]))
    config = configuration(trace)
    if config is None:
        return RunLayout(trace.attrs["run_id"], None, sizes)
    wide = {axis for axis, size in sizes.items() if size > 1}
    cut = [letter for letter, axes in _tensor_axes(config).items() if axes & wide]
    return RunLayout(_kind(config, cut, wide), _family(config, cut, wide), sizes)


def _tensor_axes(config):
    """{loop: the axes that cut it}, of loops that any axis cuts, without the data axes."""
    split = config.splits["dense"]
    axes = {letter: {*getattr(split, letter).split()}.difference(_DATA) for letter in "mnk"}
    return {letter: names for letter, names in axes.items() if names}


def _kind(config, cut, wide):
    """Scheme, schedule and ZeRO, as far as the run has axes for them."""
    parallel, parts = config.parallel, []
    if cut:
        name = "split" if parallel.split else parallel.scheme
        along = "" if len(cut) == len(_tensor_axes(config)) else f" along {' '.join(cut)}"
        parts.append(f"{name}{along}")
    if "p" in wide:
        parts.append(parallel.schedule or "pipeline")
    if "c" in wide:
        parts.append(f"context {parallel.context}")
    if wide & _DATA and (parallel.zero or not parts):
        parts.append(f"ZeRO {parallel.zero}" if parallel.zero else "data parallel")
    return ", ".join(parts)


def _family(config, cut, wide):
    """As many dimensions as loops are cut; m alone is data parallelism."""
    split = config.splits["dense"]
    deep = {*split.replicate.split()} & {*split.m.split()} & wide - _DATA
    if cut in ([], ["m"]):
        return None
    return "2.5d" if len(cut) == 2 and deep else f"{len(cut)}d"
