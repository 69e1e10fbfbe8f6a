"""Predict RaNNC's experiments: enlarged BERT on 32 devices, and ResNet on 8 and 32 devices.

M. Tanaka et al., "Automatic Graph Partitioning for Very Large-scale Deep Learning",
arXiv:2103.16063, claim that RaNNC trains models five times larger than Megatron-LM can train, is
about as fast as Megatron-LM on the same models, and is faster than GPipe in all settings. RaNNC's
README shows two plans, which tests/partition/baselines/test_rannc_plan.py reproduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.config.package_data import shipped
from hpc3d.partition.baselines import contenders
from hpc3d.partition.baselines.contenders import Contender, Task
from hpc3d.partition.baselines.rannc_plan import rannc
from hpc3d.partition.baselines.side_by_side import as_row, ours
from hpc3d.partition.baselines.tensor_pipeline import megatron, megatron_pipeline
from hpc3d.partition.capture import capture
from hpc3d.partition.factory import made
from hpc3d.partition.operation_costs import Operations
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.machine.machine_file import load

if TYPE_CHECKING:
    from argparse import Namespace

_V100 = "machines/v100-8x4.toml"
_MARGIN = 0.1  # fraction of the device memory left free
_NONE = {"fits": False}  # default row for a planner that was not run
_TIMES_LARGER, _CLOSE = 5.0, 0.1

_ASSUMED = """\
The paper's abstract and the README do not specify all conditions. Assumptions: nodes of 8 V100
with one EDR port (inputs/machines/v100-8x4.toml) and 32 GB per device, of which 10 % is left free;
float32 and AdamW, 16 bytes per parameter; BERT on 256 sequences of 512 tokens with dropout; ResNet
on 16 images per device. All times are predicted with a cost model; nothing is measured.
Megatron-LM shards layers over t <= 8 ranks and may use activation checkpointing per layer. Without
a pipeline, as in its first version, it has a single microbatch; with a pipeline, up to 128. GPipe
has at least two stages, with equal numbers of layers or equal times, up to 128 microbatches, and
recomputation. RaNNC has up to 32 microbatches and recomputation. Its stages offload the received
tensors to host memory, which is assumed to take no time."""


class Setting(NamedTuple):
    """Setting of an experiment: model, number of samples per step, and number of ranks."""

    model: str
    batch: int
    ranks: int


_HIDDEN, _LAYERS = (1024, 1536, 2048), (24, 48, 96, 144, 192, 256)
# The last model is not in the paper. Without it, no model would have five times as many
# parameters as the largest model that Megatron-LM can train.
_BERT = [
    Setting(f"inputs.partition.bert:enlarged({hidden}, {layers})", 256, 32)
    for hidden, layers in (*product(_HIDDEN, _LAYERS), (2048, 288))
]
_RESNET = [
    Setting(f"inputs.partition.resnet:enlarged({depth}, 8)", 16 * ranks, ranks)
    for depth, ranks in product((50, 101, 152), (8, 32))
]
_QUICK = {
    "bert": [setting for setting in _BERT if "(2048, " in setting.model][:3],
    "resnet": _RESNET[:2],
}

_Planner = Callable[[Task], Contender]

_OF_BERT: tuple[_Planner, ...] = (rannc, megatron, megatron_pipeline, contenders.gpipe_hybrid)
_OF_RESNET: tuple[_Planner, ...] = (rannc, contenders.gpipe, contenders.torchgpipe)


def main(options: Namespace) -> dict[str, Any]:
    """Print and return the results of both experiments and the verdicts on the paper's claims.

    `options.machine` is the machine file; the default machine has 32 V100 GPUs. If `options.quick`
    is true, only some of the models are included.
    """
    machine = load(options.machine or shipped(_V100))
    settings = _QUICK if options.quick else {"bert": _BERT, "resnet": _RESNET}
    print(f"{_ASSUMED}\n\nSamples per second (-: does not fit in memory)")
    bert = [*_table(machine, settings["bert"], _OF_BERT)]
    resnet = [*_table(machine, settings["resnet"], _OF_RESNET)]
    found = claims(bert, resnet)
    print("\n" + "\n".join(found.values()))
    return {"bert": bert, "resnet": resnet, "claims": found}


def _table(machine, settings, planners) -> Iterator[dict[str, Any]]:
    known, head = {}, True
    for setting in settings:
        if setting.model not in known:
            known = {setting.model: _loaded(setting.model)}
        found = point(machine, setting, *known[setting.model], planners)
        if head:
            names = "".join(f"{name:>23s}" for name in found["rows"])
            print(f"\n{'model':24s}{'10^9':>7s}{'ranks':>6s}{names}")
            head = False
        print(_line(found), flush=True)
        yield found


def _loaded(model):
    module, inputs = made(model)
    count = sum(each.numel() for each in module.parameters())
    return Operations(capture(module, inputs)), count / 1e9


def point(
    machine: Machine,
    setting: Setting,
    operations: Operations,
    billions: float,
    planners: Sequence[_Planner],
) -> dict[str, Any]:
    """Return the fields of the setting, and the plans of hpc3d and of `planners`, as a dict.

    The key "rows" holds a dict from planner name to plan.
    """
    memory = (1 - _MARGIN) * machine.memory_gb * 1e9
    task = Task.of(operations, machine, setting.batch, setting.ranks, memory)
    found = [planner(task) for planner in (ours, *planners)]
    rows = {each.name: as_row(each, setting.batch) for each in found}
    return {**setting._asdict(), "billions": billions, "rows": rows}


def _line(found):
    rates = "".join(f"{_rate(row):>23s}" for row in found["rows"].values())
    return f"{_short(found['model']):24s}{found['billions']:7.3f}{found['ranks']:6d}{rates}"


def _short(model):
    """Return a model's name in the form MODULE:FACTORY, without package names."""
    module, _, factory = model.partition(":")
    return f"{module.rpartition('.')[2]}:{factory}"


def _rate(row):
    """Format the throughput and layout of a plan, or return "-" if it does not fit in memory.

    The layout has the form "stages x replicas (x ranks per replica) m microbatches".
    """
    if not row["fits"]:
        return "-"
    counts = {*row["replicas"]}
    replicas = str(max(counts)) if len(counts) == 1 else f"{min(counts)}-{max(counts)}"
    ways = f"x{row['ways']}" if row["ways"] > 1 else ""
    how = f"{row['stages']}x{replicas}{ways} m{row['microbatches']}"
    return f"{row['samples_s']:.4g} {how:>13s}"


def claims(bert: Sequence[Mapping[str, Any]], resnet: Sequence[Mapping[str, Any]]) -> dict:
    """Check the paper's claims; return a dict from claim to a one-line verdict."""
    gpipe = ("GPipe hybrid", "GPipe, even layers", "GPipe, by time")
    lines = {
        "five times larger": _larger(bert, "Megatron-LM"),
        "than with a pipeline": _larger(bert, "Megatron-LM, pipeline"),
        "comparable": _comparable(bert, "Megatron-LM"),
        "better than GPipe": _better([*bert, *resnet], "RaNNC", gpipe),
    }
    others = "RaNNC", "Megatron-LM", "Megatron-LM, pipeline", *gpipe
    lines["ours"] = _better([*bert, *resnet], "ours", others)
    return lines


def _larger(points, other):
    """Compare the largest models that RaNNC and another planner can train, in one line.

    The ratio of the two sizes is only a lower bound if RaNNC can train the largest model.
    """
    ours, theirs = (
        max((each["billions"] for each in points if each["rows"][name]["fits"]), default=0.0)
        for name in ("RaNNC", other)
    )
    if not theirs:
        return f'"five times larger" than {other}: none of its plans fits in memory'
    largest = max(each["billions"] for each in points)
    open_ended = theirs < ours == largest and ours < _TIMES_LARGER * theirs
    verdict = "not decided" if open_ended else _verdict(ours >= _TIMES_LARGER * theirs)
    least = "at least " if ours == largest else ""
    return (
        f'"five times larger" than {other}: {verdict}; {ours:.3f} against {theirs:.3f} x 10^9 '
        f"parameters, {least}{ours / theirs:.1f} times"
    )


def _comparable(points, other):
    """Compare the throughput of RaNNC and another planner in one line.

    Only the models that both planners can train are compared.
    """
    ratios = [ratio for _, ratio in _ratios(points, "RaNNC", (other,))]
    if not ratios:
        return (
            f'"comparable on the same models" to {other}: no model can be trained by both planners'
        )
    middle = median(ratios)
    return (
        f'"comparable on the same models" to {other}: {_verdict(abs(middle - 1) <= _CLOSE)}; '
        f"{_spread(ratios)} times its throughput in samples/s on {len(ratios)} models"
    )


def _better(points, name, others):
    """Report in one line whether planner `name` is always faster than the planners in `others`.

    The line ends with the settings in which planner `name` is slower, if there are any.
    """
    ratios = dict(_ratios(points, name, others))
    worse = [where for where, ratio in ratios.items() if ratio < 1]
    best = "GPipe" if name == "RaNNC" else "all others"
    found = f'{name} "better than {best} in all settings": {_verdict(not worse)}'
    if ratios:
        found += f"; {_spread([*ratios.values()])} times the throughput in {len(ratios)} settings"
    return found + (f", slower for {', '.join(worse)}" if worse else "")


def _ratios(points, name, others) -> Iterator[tuple[str, float]]:
    """Yield each setting, with the throughput of `name` relative to the fastest of `others`.

    A setting is skipped if the planner `name` or all other planners
    cannot train the model.
    """
    for each in points:
        rows = each["rows"]
        rates = [rows[other]["samples_s"] for other in others if rows.get(other, _NONE)["fits"]]
        if rates and rows[name]["fits"]:
            where = f"{_short(each['model'])} on {each['ranks']}"
            yield where, rows[name]["samples_s"] / max(rates)


def _spread(ratios):
    return f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}"


def _verdict(holds):
    return "holds" if holds else "does not hold"
