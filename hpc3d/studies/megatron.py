"""Predict published Megatron-LM step times with a performance model of the machine.

V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198: tables 4 and 5, figure 1. D. Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", SC 2021, arXiv:2104.04473: table 1.

For the second paper, the microbatch size, model chunks, dropout, gradient clipping and, for the
smaller models, the overlap of the gradient reduction with the backward pass are taken from the
authors' scripts (NVIDIA/Megatron-LM examples/sc21/run_table_1.sh). The machine model contains the
properties that the first paper's results showed to be necessary, but no parameter is fitted to
these results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.comm.grid import AXES
from hpc3d.config.input_file import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from hpc3d.config.resolve import resolve
from hpc3d.predict.simulation.count import predict
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.predict.simulation.summary import summary
from hpc3d.trace.schema import PHASE

if TYPE_CHECKING:
    from hpc3d.predict.machine.machine import Machine

SELENE = "machines/a100-selene.toml"
_SEQUENCE, _VOCABULARY, _DROPOUT = 2048, 51200, 0.1
_STATE = 18  # bytes per parameter: float16 value; float32 gradient, master value, two moments
_KINDS = ("parameter", "gradient", "optimizer")


class PublishedStep(NamedTuple):
    """Configuration and published time of a training step.

    `t` is the tensor-parallel size, `p` is the number of pipeline stages, `chunks` is the number
    of model chunks per stage, and `micro` is the microbatch size in sequences per replica.
    """

    model: str
    layers: int
    hidden: int
    heads: int
    t: int
    p: int
    ranks: int
    batch: int
    micro: int
    chunks: int
    scheme: str
    recompute: str
    overlap: bool
    seconds: float


# arXiv:2205.05198, table 5. Rows without full recomputation use sequence parallelism.
RECOMPUTATION = [
    PublishedStep("22B", 48, 6144, 64, 8, 1, 8, 4, 4, 1, "1d", "full", True, 1.42),
    PublishedStep("22B", 48, 6144, 64, 8, 1, 8, 4, 4, 1, "1d-sequence", "selective", True, 1.10),
    PublishedStep("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3, "1d", "full", True, 18.13),
    PublishedStep(
        "175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3, "1d-sequence", "selective", True, 13.75
    ),
]
# arXiv:2205.05198, table 4: scheme, recomputation, and times in ms of the forward and the backward
# pass through one layer of the 22B model.
LAYERS = [
    ("1d", "none", 7.7, 11.9),
    ("1d-sequence", "none", 7.2, 11.8),
    ("1d", "full", 7.7, 19.5),
    ("1d", "selective", 7.7, 13.2),
    ("1d-sequence", "selective", 7.2, 13.1),
]
# arXiv:2205.05198, figure 1 (data from calculon-ai/calculon): model, layers L, hidden size h,
# attention heads, pipeline stages p, and GiB of parameters and optimizer states per rank. The
# published memory is _STATE bytes per parameter for 12 L h^2 / (t p) parameters (t tensor-parallel
# ranks), excluding embedding tables, biases and norms.
STATES = [
    ("22B", 48, 6144, 64, 1, 45.5625),
    ("175B", 96, 12288, 96, 8, 45.5625),
    ("530B", 105, 20480, 128, 35, 31.640625),
    ("1T", 128, 25600, 160, 64, 32.958984375),
]
# arXiv:2104.04473, table 1: model, layers, hidden size, attention heads, tensor-parallel size,
# pipeline stages, ranks, batch size, microbatch size, chunks, and TFLOP/s per rank. The microbatch
# size and the number of chunks are from the authors' scripts.
WEAK_SCALING = [
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 16, 1, 138),
    ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
    ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135),
    ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138),
    ("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 140),
    ("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
    ("310.1B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155),
    ("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163),
    ("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163),
]
# Modified rows of WEAK_SCALING with a different microbatch size or number of chunks.
OTHERWISE = [("39.1B", {"micro": 1}), ("39.1B", {"chunks": 2}), ("145.6B", {"chunks": 1})]
_LATER = 258.74e12  # peak GEMM rate in FLOP/s with newer software (see the machine file)

ASSUMED = """\
Assumptions for both tables: dropout 0.1, AdamW, float16 with float32 gradients, no network
contention. The predicted runs save gathered activations; Megatron-LM gathers them again in the
backward pass and overlaps this communication with GEMMs.
Differences in the second table: Megatron-LM all-reduces gradients in float16, the predicted runs
in float32, which is twice the volume. Each of the t tensor-parallel ranks of Megatron-LM sends 1/t
of the activations to the next stage; in the predicted runs, each rank sends all of them."""


def weak(row: tuple) -> PublishedStep:
    """Convert a row of WEAK_SCALING to a `PublishedStep`.

    The published FLOP/s are converted to seconds with equation 3 of arXiv:2104.04473.
    """
    model, layers, hidden, heads, t, p, ranks, batch, micro, chunks, rate = row
    flop = 96 * batch * _SEQUENCE * layers * hidden**2
    flop *= 1 + _SEQUENCE / (6 * hidden) + _VOCABULARY / (16 * layers * hidden)
    layout = layers, hidden, heads, t, p, ranks, batch, micro, chunks
    return PublishedStep(model, *layout, "1d", "full", p == 1, flop / (ranks * rate * 1e12))


def config_of(row: PublishedStep) -> Config:
    """Return the resolved configuration of a published step."""
    replicas = row.ranks // (row.t * row.p)
    parallel = ParallelConfig(
        scheme=row.scheme,
        recompute=row.recompute,
        overlap=row.overlap,
        microbatches=row.batch // (replicas * row.micro),
        schedule="interleaved" if row.chunks > 1 else None,
        chunks=row.chunks,
    )
    sizes = {"vocabulary": _VOCABULARY, "sequence": _SEQUENCE, "dropout": _DROPOUT}
    config = Config(
        mesh=MeshConfig(p=row.p, d=replicas, x=row.t, y=1, z=1),
        parallel=parallel,
        model=ModelConfig(layers=row.layers, hidden=row.hidden, heads=row.heads, **sizes),
        train=TrainConfig(batch=row.batch, dtype="float16"),
    )
    return resolve(config, row.ranks)


def rows(published: Iterable[PublishedStep], machine: Machine) -> list[dict[str, Any]]:
    """Predict the step time of each published step; return one dict per step.

    The keys are the model, the recomputation, the number of ranks, the published and the predicted
    step time, the relative error, and the fractions of the step time spent on pipeline bubbles and
    on communication.
    """
    return [predicted(row, machine) for row in published]


def predicted(row: PublishedStep, machine: Machine) -> dict[str, Any]:
    config = config_of(row)
    found = summary(simulate(config, _VOCABULARY, machine), config, machine)
    return {
        "model": row.model,
        "recompute": row.recompute,
        "ranks": row.ranks,
        "published_s": row.seconds,
        "predicted_s": found["step_time_s"],
        "error": found["step_time_s"] / row.seconds - 1,
        "bubble": found["bubble"],
        "communication": found["communication"],
    }


def errors(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean and the maximum of the predictions' absolute relative errors."""
    sizes = [abs(row["error"]) for row in found]
    return {"mean": sum(sizes) / len(sizes), "worst": max(sizes)}


def layers(machine: Machine) -> list[dict[str, Any]]:
    """Predict the forward and backward times of a layer in ms, for each row of LAYERS."""
    found = []
    for scheme, recompute, *published in LAYERS:
        row = RECOMPUTATION[0]._replace(layers=2, scheme=scheme, recompute=recompute)
        forward, backward = _passes(row, machine)
        names = {"scheme": scheme, "recompute": recompute, "published_ms": published}
        found.append(names | {"predicted_ms": [forward, backward]})
    return found


def _passes(row: PublishedStep, machine: Machine) -> list[float]:
    """Return the forward and backward times of one layer in ms.

    The backward pass includes recomputation.
    """
    (run,) = simulate(config_of(row), _VOCABULARY, machine)
    inside = run.rows[run.rows["layer"] >= 0]
    forward = inside["phase"] == PHASE.index("forward")
    return [float(inside["dur"][at].sum()) / 1e6 / row.layers for at in (forward, ~forward)]


def states() -> list[dict[str, Any]]:
    """Predict the parameter and optimizer memory of a rank on the first stage, per row of STATES.

    The sizes are given with and without the embedding tables, which the published sizes exclude.
    The sizes depend neither on the number of microbatches nor on the number of model chunks.
    """
    found = []
    for model, count, hidden, heads, p, published in STATES:
        layout = count, hidden, heads, 8, p, 8 * p, 1, 1, 1, "1d-sequence", "selective"
        config = config_of(PublishedStep(model, *layout, True, 0.0))
        peak = predict(config, _VOCABULARY, dict.fromkeys(AXES, 0)).peak
        held = sum(peak[kind] for kind in _KINDS)
        tables = _STATE * hidden * (_VOCABULARY // 8 + _SEQUENCE)
        found.append(
            {
                "model": model,
                "published_GiB": published,
                "predicted_GiB": (held - tables) / 2**30,
                "with_tables_GiB": held / 2**30,
                "error": (held - tables) / 2**30 / published - 1,
            }
        )
    return found


def facts(machine: Machine) -> dict[str, list[float]]:
    """Return the prediction errors for the two 22B steps with modified machine models.

    Each modification changes one property; most modifications remove a kernel rate. The result is
    a dict from modification to the relative errors with full and with selective recomputation.
    """
    changed = {"with all": machine, f"products at {_LATER:.5g}": _with_later_products(machine)}
    for name in machine.kernels:
        rates = {other: rate for other, rate in machine.kernels.items() if other != name}
        changed[name] = replace(machine, kernels=rates)
    changed["kernels"] = replace(machine, kernels={})
    pair = RECOMPUTATION[:2]
    return {fact: [row["error"] for row in rows(pair, each)] for fact, each in changed.items()}


def _with_later_products(machine: Machine) -> Machine:
    """Return the machine with the last entry of its float16 GEMM rates replaced by _LATER."""
    rates = machine.gemm["float16"]
    rates = replace(rates, rate=(*rates.rate[:-1], _LATER))
    return replace(machine, gemm=machine.gemm | {"float16": rates})


def otherwise(machine: Machine) -> list[dict[str, Any]]:
    """Predict the step times of the variants in OTHERWISE, which modify rows of WEAK_SCALING."""
    by_name = {values[0]: weak(values) for values in WEAK_SCALING}
    changed = [(by_name[model]._replace(**change), change) for model, change in OTHERWISE]
    return [predicted(row, machine) | {"change": change} for row, change in changed]
