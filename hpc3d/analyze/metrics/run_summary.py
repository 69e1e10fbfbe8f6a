"""Description of a run in the header of its report."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np

from hpc3d.analyze.metrics.columns import hosts
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.steady import Steady, averaged
from hpc3d.config.input_file import ParallelConfig
from hpc3d.console.sanitize import counted
from hpc3d.trace.locate import NEWEST
from hpc3d.trace.reader import Trace
from hpc3d.training.graphed_step import graph_in_words

_BUSY = 0.1  # share of the CPU time of other processes above which a host is busy
_SHOWN = 8  # maximum number of listed hosts
CORES_SHARED = "ranks share cores, so times are longer than with one core per rank"


def about(trace: Steady, completed: int) -> dict[str, str]:
    """Return the known properties of a run as a dict from title to text.

    `completed` is the number of steps that all attempts of the run have completed.
    """
    attrs, config = trace.attrs, configuration(trace)
    known = {
        "run": attrs["run_id"],
        "created": attrs.get("created_utc"),
        "ranks": _ranks(attrs),
        "hosts": _hosts(trace),
        "cores": _cores(trace),
        "other processes": _others(trace.trace),
        **(_configured(config, attrs) if config else {}),
        "program": _program(attrs),
        "MPI": attrs.get("mpi"),
        "trace": _trace(trace.trace, completed),
        "other layout": attrs.get("other_layout"),
        "averages": averaged(trace),
        "log": log if (log := trace.path.parent / "train.log").is_file() else None,
    }
    return {title: str(text) for title, text in known.items() if text}


def _ranks(attrs):
    sizes = zip(attrs["axes"].split(), attrs["axis_sizes"])
    mesh = " ".join(f"{axis}={size}" for axis, size in sizes if size > 1)
    return f"{attrs['world_size']}" + (f": {mesh}" if mesh else "")


def _hosts(trace):
    count = Counter(name or "unknown" for name in hosts(trace).values())
    named = [f"{name} ({ranks})" for name, ranks in count.most_common(_SHOWN)]
    more = [f"{len(count) - _SHOWN} more"] if len(count) > _SHOWN else []
    return f"{', '.join(named + more)}; {trace.attrs.get('device') or 'unknown device'}"


def _cores(trace: Trace) -> str | None:
    """Return the numbers of cores and ranks on rank 0's host as text, or None if unknown."""
    count, host = trace.attrs.get("cores"), trace.ranks["host_id"]
    if not isinstance(count, int) or count < 1:
        return None
    ranks = int((host == host[0]).sum())
    share = f": {CORES_SHARED}" if ranks > count else ""
    return f"{count} for {counted(ranks, 'rank')} per host{share}"


def other_cpu_share(trace: Trace) -> float | None:
    """Return the share of the CPU time that other processes used, or None if it is unknown.

    The share is that of the newest attempt, on the host with the largest share.
    """
    if trace.path.name != NEWEST:
        return None
    try:
        found = json.loads((trace.path.parent / "environment.json").read_bytes())
    except (OSError, ValueError):
        return None
    share = found.get("other_cpu_share") if isinstance(found, dict) else None
    return share if isinstance(share, float) and 0 <= share <= 1 else None


def _others(trace: Trace) -> str | None:
    share = other_cpu_share(trace)
    return None if share is None else f"{share:.0%} of the CPU time of the busiest host"


def busy_hosts(trace: Trace) -> str | None:
    """Return a warning if other processes used a large share of the CPU time, else None."""
    text = _others(trace)
    busy = (other_cpu_share(trace) or 0) > _BUSY
    return f"other processes used {text}, so times may be longer" if busy else None


def outnumbered(trace: Trace) -> str | None:
    """Return a warning if rank 0's host has more ranks than cores, else None."""
    text = _cores(trace)
    return f"cores: {text}" if text and text.endswith(CORES_SHARED) else None


def _configured(config, attrs):
    model, train, parallel = config.model, config.train, config.parallel
    if config.torch.factory:
        return {
            "model": f"torch module {config.torch.factory}",
            "batch": f"{counted(train.batch, 'sample')} per step,"
            f" {train.dtype}, {train.optimizer}",
            "layout": f"schedule {parallel.schedule}, microbatches {parallel.microbatches}, "
            f"chunks {parallel.chunks}; ZeRO {parallel.zero}",
        }
    vocabulary = f", vocabulary {model.vocabulary}" if model.vocabulary else ""
    return {
        "model": f"{model.kind}: layers {model.layers}, hidden {model.hidden}, heads {model.heads}"
        f", sequence {model.sequence}{vocabulary}",
        "batch": f"{counted(train.batch, 'sequence')} ="
        f" {counted(train.batch * model.sequence, 'token')} per step,"
        f" {train.dtype}, {train.optimizer}",
        "layout": f"scheme {parallel.scheme}; schedule {parallel.schedule or 'none'},"
        f" microbatches {parallel.microbatches}, chunks {parallel.chunks}; {parallel.sharding}",
        "techniques": "; ".join(_techniques(config)),
        "CUDA graph": _graph(config, attrs),
    }


def _graph(config, attrs):
    transport = attrs.get("transport") or ""
    return graph_in_words(config, transport) if config.train.backend == "cupy" else ""


def _techniques(config):
    """Yield the non-default settings of techniques that reduce memory or communication."""
    default, parallel, train = ParallelConfig(), config.parallel, config.train
    for key in ("recompute", "keep_dtype", "offload", "reduce_dtype", "compression"):
        if (value := getattr(parallel, key)) != getattr(default, key):
            listed = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            yield f"{key} {listed}"
    if train.product_dtype:
        yield f"matrix products in {train.product_dtype}, scaled by {train.product_scale}"


def _program(attrs):
    version, git = attrs.get("hpc3d_version"), str(attrs.get("git") or "")
    changed = " with uncommitted changes" if git.endswith("+") else ""
    revision = git.removesuffix("+")[:12]
    return f"hpc3d {version}" + (f", git {revision}{changed}" if git else "")


def untimed(trace: Trace) -> str | None:
    """Return a warning if the trace lacks the steps of earlier attempts, else None."""
    text = trace.attrs.get("other_layout")
    return f"the times exclude steps with another layout ({text})" if text else None


def _trace(trace, completed):
    recorded = len(np.unique(trace.steps["step"]))
    kind = trace.attrs.get("kind") or "measured"
    part = f"{recorded} of " if recorded < completed else ""
    steps = f"{part}{counted(completed, 'completed step')}"
    text = f"{kind}: {counted(len(trace.events), 'event')} in {steps}"
    error = trace.clock_model["resid_p99_ns"]
    if len(error) and np.nanmax(error) > 0:
        text += f"; clocks agree to {np.nanmax(error) * 1e-3:.1f} us (99 %)"
    return text
