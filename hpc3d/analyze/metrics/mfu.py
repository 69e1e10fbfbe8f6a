"""Model FLOPs utilization (MFU) and hardware FLOPs utilization (HFU) of a run.

MFU and HFU are defined in arXiv:2205.05198: the floating-point operations of the model, or
those that were executed, divided by the operations at peak rate during a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import cells, with_label
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.step import rate, ratio, slowest_seconds
from hpc3d.model.families import family_of
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.config.input_file import ModelConfig
    from hpc3d.trace.reader import Trace

_PRODUCTS = ("gemm", "attention", "graph")


def model_flops(model: ModelConfig, batch: int, vocabulary: int) -> float:
    """Return the FLOP of a step on `batch` sequences, without recomputation.

    For GPT-2, this is equation 7: 72 B L s h^2 (1 + s / (6 h) + V / (12 h L)), where `model` is
    the section [model] with L layers, hidden size h and sequence length s. The count includes
    the matrix products of the model family, 2 m n k for [m, k] times [k, n], and attention
    including its masked half. The backward pass counts twice the forward pass. A token counts
    only the experts that it is routed to.
    """
    family = family_of(model)
    return 3 * batch * model.sequence * family.flops(family.sizes(model, vocabulary))


def efficiency_row(trace: Trace, peak: float | None = None) -> dict[str, Any]:
    """Return the FLOP of a step, the FLOP/s of all ranks, and MFU and HFU if `peak` is given.

    The rates refer to the median step time of the slowest rank. `peak` is the peak FLOP/s of one
    rank. Unknown values are `None`.

    model_flop is equation 7 for the configuration of the run. recorded_flop is the sum over ranks
    of the recorded matrix products, attention and CUDA graphs. Attention on complete sequences
    also counts its masked half (4 s h per token and layer forward, twice that backward), so both
    values are equal except for

    * the vocabulary, which is padded to a multiple of the ranks that shard it;
    * the dense product in the head of BERT, which all ranks along x repeat with scheme 1d;
    * recomputation, which only recorded_flop includes;
    * expert capacity: recorded_flop includes unused slots and excludes dropped tokens;
    * chunked attention, which skips chunks that a causal mask hides. The forward pass takes
      (n + 1) / 2n of 4 s h with n chunks on one rank, or (2 r + 1) / 4r on a ring of r ranks. The
      backward pass takes 5/2 of that, because it recomputes the scores.

    MFU uses model_flop and HFU recorded_flop. With CPU time, the rates, MFU and HFU are
    unknown.
    """
    step = float(np.median(slowest_seconds(trace)))
    model, recorded = _of_model(trace), recorded_flops(trace)
    capacity = peak * trace.attrs["world_size"] * step if peak and one_time(trace) else None
    return {
        "step_s": step,
        "model_flop": model,
        "recorded_flop": recorded,
        "flop_per_s": rate(trace, model, step),
        "recorded_flop_per_s": rate(trace, recorded, step),
        "mfu": ratio(model, capacity),
        "hfu": ratio(recorded, capacity),
    }


def recorded_flops(trace: Trace) -> float:
    """Return the operations per step in the matrix products and attention of all ranks."""
    return _sum_of(trace, with_label(trace.events, "op", _PRODUCTS))


def _of_model(trace):
    """Return equation 7. An unset vocabulary V follows from the recorded forward FLOP of the head.

    The head has 2 B s h V FLOP in the forward pass.
    """
    config = configuration(trace)
    if config is None or config.torch.factory:
        return None
    model, batch = config.model, config.train.batch
    vocabulary = model.vocabulary
    if vocabulary is None:
        events = trace.events
        forward = with_label(events, "op", ["gemm"]) & with_label(events, "phase", ["forward"])
        head = _sum_of(trace, forward & (events["layer"] == -1))
        family = family_of(model)
        others = sum(each.flops for each in family.head(family.sizes(model, 0)))
        vocabulary = (head / (batch * model.sequence) - others) / (2 * model.hidden)
    return model_flops(model, batch, vocabulary)


def _sum_of(trace, events):
    """Return the operations per step in some of the events."""
    inside = events & (cells(trace) >= 0)
    return float(trace.events["flops"][inside].sum()) / len(np.unique(trace.steps["step"]))
