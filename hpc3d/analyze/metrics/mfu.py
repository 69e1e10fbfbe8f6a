"""How much of what the hardware could compute a run has used.

MFU and HFU are those of arXiv:2205.05198: the floating-point operations of the model,
and those that were done, over what the peak rate would do in the time of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import cells, labelled
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.step import rate, ratio, slowest_seconds
from hpc3d.model.families import family_of
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.config.input_file import ModelConfig
    from hpc3d.trace.reader import Trace

_PRODUCTS = ("gemm", "attention", "graph")


def model_flops(model: ModelConfig, batch: int, vocabulary: int) -> float:
    """Operations of a step on `batch` sequences without recomputation: equation 7, for GPT-2

    72 B L s h^2 (1 + s / (6 h) + V / (12 h L)).

    `model` is a section [model] with the layers L, hidden h and sequence s.  What counts are the
    products of its family, 2 m n k for [m, k] times [k, n], and attention with its masked half,
    forward and twice that backward; of experts those alone that a token goes to.
    """
    family = family_of(model)
    return 3 * batch * model.sequence * family.flops(family.sizes(model, vocabulary))


def efficiency_row(trace: Trace, peak: float | None = None) -> dict[str, Any]:
    """FLOP of a step, FLOP/s of all ranks in the median time of the slowest rank, and MFU and HFU
    if the `peak` FLOP/s of one rank is given; None stands for what is not known.

    model_flop is equation 7 for the run's configuration.  recorded_flop is the sum over the ranks
    of the events of products, attention and CUDA graphs.  Whole attention counts its masked
    half, too (4 s h a token and layer forward, twice that backward), so that the two are equal
    but for

    * the vocabulary, which is padded to a multiple of the ranks that share it;
    * the dense product of BERT's head, which under scheme 1d all ranks of x do;
    * recomputation, which only recorded_flop has;
    * slots of experts, of which it has the empty ones, and none of what is dropped;
    * attention chunk by chunk, which leaves out chunks that a causal mask hides: forward it does
      (n + 1) / 2n of 4 s h with n chunks on one rank, (2 r + 1) / 4r on a ring of r ranks, and
      backward 5/2 of that, as it makes the scores again.

    So MFU is that of model_flop and HFU that of recorded_flop.  Where ranks count their CPU
    time there is neither a rate nor MFU and HFU.
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
    """Operations of a step in the products and the attention that all ranks recorded."""
    return _sum_of(trace, labelled(trace.events, "op", _PRODUCTS))


def _of_model(trace):
    """Equation 7; where the configuration leaves the vocabulary to the tokenizer, that of the
    recorded products of the head, 2 B s h V forward."""
    config = configuration(trace)
    if config is None or config.torch.factory:
        return None
    model, batch = config.model, config.train.batch
    vocabulary = model.vocabulary
    if vocabulary is None:
        events = trace.events
        forward = labelled(events, "op", ["gemm"]) & labelled(events, "phase", ["forward"])
        head = _sum_of(trace, forward & (events["layer"] == -1))
        family = family_of(model)
        others = sum(each.flops for each in family.head(family.sizes(model, 0)))
        vocabulary = (head / (batch * model.sequence) - others) / (2 * model.hidden)
    return model_flops(model, batch, vocabulary)


def _sum_of(trace, events):
    """The operations of a step in some of the events."""
    inside = events & (cells(trace) >= 0)
    return float(trace.events["flops"][inside].sum()) / len(np.unique(trace.steps["step"]))
