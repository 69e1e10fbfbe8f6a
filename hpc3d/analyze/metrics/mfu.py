"""Model FLOPs utilization (MFU) and hardware FLOPs utilization (HFU) of a run.

As defined in arXiv:2205.05198, MFU is the number of floating-point operations of the model divided
by the number that could be executed at peak rate during the step. HFU is the same ratio for the
number of executed operations, including recomputation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpc3d.analyze.metrics.columns import cells, with_label
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.step import rate, ratio, slowest_seconds
from hpc3d.config.input_file import ModelConfig
from hpc3d.model.families import family_of
from hpc3d.trace.reader import Trace
from hpc3d.trace.trace_config import one_time

_PRODUCTS = ("gemm", "attention", "graph")


def model_flops(model: ModelConfig, batch: int, vocabulary: int) -> float:
    """Return the FLOP of a training step on `batch` sequences, excluding recomputation.

    For GPT-2, this is equation 7 of arXiv:2205.05198: 72 B L s h^2 (1 + s / (6 h) +
    V / (12 h L)) for batch size B, L layers, sequence length s, hidden size h and vocabulary V.
    The count includes the matrix products of the model family, with 2 m n k FLOP for [m, k] times
    [k, n], and attention including the masked half of the score matrix. The backward pass counts
    as two forward passes. For each token, only the experts to which it is routed are counted.
    """
    family = family_of(model)
    return 3 * batch * model.sequence * family.flops(family.sizes(model, vocabulary))


def efficiency_row(trace: Trace, peak: float | None = None) -> dict[str, Any]:
    """Return the FLOP of a step, the FLOP/s of all ranks, and MFU and HFU if `peak` is given.

    The rates refer to the median step time of the slowest rank. `peak` is the peak FLOP/s of one
    rank. Unknown values are `None`.

    model_flop is the result of `model_flops` for the run's configuration. recorded_flop is the
    FLOP of the recorded matrix products, attention and CUDA graphs, summed over ranks. Attention
    on complete sequences includes the masked half of the score matrix (4 s h FLOP per token and
    layer in the forward pass, twice as many in the backward pass). The two values are therefore
    equal, except for the following differences:

    * recorded_flop uses the vocabulary padded to a multiple of the number of ranks that shard it.
    * With scheme 1d, recorded_flop counts the dense product in the head of BERT on every rank
      along x.
    * Only recorded_flop includes recomputation.
    * With experts, recorded_flop includes unused slots and excludes dropped tokens.
    * Chunked attention skips chunks that are fully masked by the causal mask. The forward pass
      executes a fraction (n + 1) / 2n of 4 s h with n chunks on one rank, or (2 r + 1) / 4r on a
      ring of r ranks. The backward pass executes 5/2 times as many operations as the forward
      pass, because it recomputes the scores.

    MFU uses model_flop and HFU recorded_flop. If the trace contains CPU time, the rates, MFU and
    HFU are unknown.
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
    """Return the recorded FLOP of a step, summed over ranks.

    The sum includes matrix products, attention and CUDA graphs.
    """
    return _sum_of(trace, with_label(trace.events, "op", _PRODUCTS))


def _of_model(trace):
    """Return the model FLOP of a step, or None if the model is unknown.

    If the vocabulary size V is not configured, it is computed from the recorded FLOP of the head,
    whose output projection has 2 B s h V FLOP in the forward pass.
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
    """Return the FLOP per step, summed over the events for which the mask `events` is True."""
    inside = events & (cells(trace) >= 0)
    return float(trace.events["flops"][inside].sum()) / len(np.unique(trace.steps["step"]))
