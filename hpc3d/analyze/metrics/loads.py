"""What runs do in a step: the keys of their configuration that decide the work, whatever layout
shares it out; and what must be said before their times are compared."""

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
_DATA = ("data.path", "data.tokenizer")
_OF_A_STEP = ("seed", "mesh.", "parallel.", "train.", "guard.abft_every", "trace.clock")


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


def setting(load: Mapping[str, Any] | None) -> str | None:
    """The keys of a load but for SIZES, as text; None if they are not known."""
    if load is None:
        return None
    return ", ".join(f"{key} = {value}" for key, value in load.items() if key not in SIZES)


def notes(traces: Sequence[Trace], labels: Sequence[str]) -> list[str]:
    """What one must know to compare runs, a line each: every key of load and data in which they
    differ, and where ranks take turns on the cores."""
    if len(traces) < 2:
        return []
    known = [_told(trace) for trace in traces]
    keys = dict.fromkeys(key for each in known for key in each)
    lines = [_line(key, [each.get(key, "unknown") for each in known], labels) for key in keys]
    turns = [
        f"{label}: {line}" for trace, label in zip(traces, labels) if (line := outnumbered(trace))
    ]
    return [*filter(None, lines), *turns]


def differing_keys(traces: Sequence[Trace], labels: Sequence[str]) -> list[str]:
    """Every other key in which the configurations of runs differ, a line each: of the layout, of
    techniques, of the optimisation; keys that an older run has not are as by default."""
    configs = [configuration(trace) for trace in traces]
    if len(traces) < 2 or None in configs:
        return []
    known = [flat(config) for config in configs]
    decisive = {*load_of(traces[0]), *_DATA}
    keys = [key for key in known[0] if key not in decisive and key.startswith(_OF_A_STEP)]
    lines = [_line(key, [_written(each[key]) for each in known], labels) for key in keys]
    return [line for line in lines if line]


def _written(value):
    """A value as an input file has it, "absent" where it is not there."""
    return "absent" if value is None else literal(value)


def _told(trace):
    """What is compared of a run."""
    tokens = {"tokens a step": f"{int(trace.steps['tokens'].max(initial=0)):,}"}
    config, load = configuration(trace), load_of(trace)
    if load is None:
        return tokens
    return load | tokens | {key: flat(config)[key] for key in _DATA}


def _line(key, values, labels):
    """Who has which value; None where all have the same."""
    found = {}
    for value, label in zip(values, labels):
        found.setdefault(str(value), []).append(label)
    parts = "; ".join(f"{value} in {', '.join(names)}" for value, names in found.items())
    return f"{key} differs: {parts}" if len(found) > 1 else None
