"""What runs do in a step: the keys of their configuration that decide the work, whatever layout
shares it out; and all in which runs differ, to be known before their times are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.run_summary import outnumbered
from hpc3d.config.load import flat, literal
from hpc3d.model.families import with_epsilon

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace

SIZES = ("train.batch", *(f"model.{key}" for key in ("layers", "hidden", "heads", "sequence")))
_TRAIN = ("train.batch", "train.dtype", "train.optimizer")
WORK, LAYOUT, MANNER = "work", "layout", "how it runs"
_GROUPS = {  # of the keys of a section; those outside of sections are under ""
    **dict.fromkeys(("", "model", "data", "torch", "train"), WORK),
    **dict.fromkeys(("mesh", "parallel"), LAYOUT),
    **dict.fromkeys(("checkpoint", "guard", "trace", "run"), MANNER),
}
_EXCEPTIONS = {
    # They change numbers: what is rounded, what is left out.
    **dict.fromkeys(("parallel.keep_dtype", "parallel.reduce_dtype"), WORK),
    **{f"parallel.compression{end}": WORK for end in ("", "_rank", "_share")},
    # They do not change what is trained.
    **dict.fromkeys(("name", "mesh.transport", "train.max_minutes"), MANNER),
    **dict.fromkeys(("train.backend", "train.cuda_graph", "train.fused_gelu"), MANNER),
}
_FEW = 2  # runs, of one value, that are always named
_OF_MACHINE = ("hosts", "MPI", "program")  # of what heads the report of a run


def group_of(key: str) -> str:
    """What a key of the configuration decides: WORK, what is trained; LAYOUT, how that is shared
    out; or MANNER, how it runs: on what, what is recorded and saved, and where."""
    section, dot, _ = key.rpartition(".")
    return _EXCEPTIONS.get(key) or _GROUPS[section if dot else ""]


def load_of(trace: Trace) -> dict[str, Any] | None:
    """{key: value} of the keys that decide the work of a step, None if they are not known."""
    config = configuration(trace)
    if config is None:
        return None
    config = replace(config, model=with_epsilon(config.model))
    model = "torch." if config.torch.factory else "model."
    return {
        key: value for key, value in flat(config).items() if key.startswith(model) or key in _TRAIN
    }


def setting(load: Mapping[str, Any] | None, kind: str) -> str | None:
    """Whether a trace is measured or simulated, and the keys of its load but for SIZES, as text;
    None if they are not known."""
    if load is None:
        return None
    keys = [f"{key} = {value}" for key, value in load.items() if key not in SIZES]
    return ", ".join([kind, *keys])


def notes(traces: Sequence[Trace], labels: Sequence[str]) -> list[str]:
    """What one must know to compare runs beside that in which they differ, a line each: whose
    configuration is not known, and where ranks take turns on the cores."""
    if len(traces) < 2:
        return []
    named = [*zip(traces, labels)]
    unknown = [label for trace, label in named if configuration(trace) is None]
    whose = f"the configuration of {' and '.join(unknown)} is not known: no keys are compared"
    turns = [f"{label}: {line}" for trace, label in named if (line := outnumbered(trace))]
    return [whose, *turns] if unknown else turns


def differing(
    traces: Sequence[Trace], labels: Sequence[str], abouts: Sequence[Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """{group: {key: who has which value}} of all in which runs differ: of every key of their
    configurations, of the tokens of a step, of the kind of their traces, and of machine and
    program in `abouts`, what heads their reports.

    Keys that an older run has not are as by default; those of no run are compared where the
    configuration of one is not known.
    """
    found: dict[str, dict[str, str]] = {WORK: {}, LAYOUT: {}, MANNER: {}}
    if len(traces) < 2:
        return found
    for group, key, values in _compared(traces, abouts):
        if len({*values}) > 1:
            found[group][key] = _whose(values, labels)
    return found


def _compared(traces, abouts):
    """(group, key, the value of each run as text)."""
    configs = [configuration(trace) for trace in traces]
    if None not in configs:
        known = [flat(replace(each, model=with_epsilon(each.model))) for each in configs]
        for key in known[0]:
            yield group_of(key), key, [_written(each[key]) for each in known]
    tokens = [int(trace.steps["tokens"].max(initial=0)) for trace in traces]
    yield WORK, "tokens a step", [f"{each:,}" for each in tokens]
    yield MANNER, "trace", [trace.attrs.get("kind") or "measured" for trace in traces]
    for key in _OF_MACHINE:
        yield MANNER, key, [_about(each, key) for each in abouts]


def _about(about, key):
    return about.get(key, "unknown").replace(";", ",")  # ; parts the values of runs


def _written(value):
    """A value as an input file has it, "absent" where it is not there."""
    return "absent" if value is None else literal(value)


def _whose(values, labels):
    """Each value, and the runs that have it; last that of the most, where these are many."""
    found = {}
    for value, label in zip(values, labels):
        found.setdefault(value, []).append(label)
    usual = max(found, key=lambda value: len(found[value]))
    many = len(found[usual]) > _FEW
    last = [f"{usual} in the others"] if many else []
    named = [each for each in found.items() if not (many and each[0] == usual)]
    return "; ".join([*(f"{value} in {' and '.join(names)}" for value, names in named), *last])
