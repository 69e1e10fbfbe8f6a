"""Workload of a training step, and configuration differences between runs.

The workload is defined by the configuration keys that determine what is computed, but not by those
that determine the parallel layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.run_summary import busy_hosts, other_cpu_share, outnumbered, untimed
from hpc3d.config.load import flat, literal
from hpc3d.console.sanitize import counted
from hpc3d.model.families import with_epsilon
from hpc3d.trace.reader import Trace

SIZES = ("train.batch", *(f"model.{key}" for key in ("layers", "hidden", "heads", "sequence")))
_TRAIN = ("train.batch", "train.dtype", "train.optimizer")
WORK, LAYOUT, EXECUTION = "workload", "layout", "execution"
_GROUPS = {  # dict from configuration section to group; the section of top-level keys is ""
    **dict.fromkeys(("", "model", "data", "torch", "train"), WORK),
    **dict.fromkeys(("mesh", "parallel"), LAYOUT),
    **dict.fromkeys(("checkpoint", "guard", "trace", "run"), EXECUTION),
}
_EXCEPTIONS = {
    # These keys select reduced precision, compression or local updates, which change the training
    # result.
    **dict.fromkeys(("parallel.keep_dtype", "parallel.reduce_dtype"), WORK),
    **dict.fromkeys(("parallel.local_steps", "parallel.sync"), WORK),
    **{f"parallel.outer_{end}": WORK for end in ("learning_rate", "momentum")},
    **{f"parallel.compression{end}": WORK for end in ("", "_rank", "_share")},
    # These keys change the training result only by rounding errors.
    **dict.fromkeys(("name", "mesh.transport", "train.max_minutes"), EXECUTION),
    **dict.fromkeys(("train.backend", "train.cuda_graph", "train.fused_gelu"), EXECUTION),
}
# Keys of WORK that do not change the training losses. The seed is compared separately.
_NOT_TRAINING = ("seed", "train.eval_every", "train.eval_batches")
_ALWAYS_NAMED = 2  # maximum number of runs or groups listed for the most frequent value of a key
_KEYS_NAMED = 4  # maximum number of keys that are named as the difference of two workloads
_OF_MACHINE = ("hosts", "MPI", "program")  # report header entries that are compared


def group_of(key: str) -> str:
    """Return the group of a configuration key.

    WORK contains the keys of the model and its training, LAYOUT the keys of the parallelization,
    and EXECUTION all other keys: the machine, tracing, checkpoints and output folders.
    """
    section, dot, _ = key.rpartition(".")
    return _EXCEPTIONS.get(key) or _GROUPS[section if dot else ""]


def load_of(trace: Trace) -> dict[str, Any] | None:
    """Return a dict of the configuration keys and values that determine the workload.

    The result is `None` if the configuration of the trace is unknown.
    """
    config = configuration(trace)
    if config is None:
        return None
    config = replace(config, model=with_epsilon(config.model))
    model = "torch." if config.torch.factory else "model."
    return {
        key: value for key, value in flat(config).items() if key.startswith(model) or key in _TRAIN
    }


def data_of(trace: Trace) -> dict[str, Any] | None:
    """Return a dict of the configuration keys and values that determine the training data.

    A separate validation text does not change the training data, unlike a fraction to hold out.
    The result is `None` if the configuration of the trace is unknown.
    """
    config = configuration(trace)
    if config is None:
        return None
    data = {key: each for key, each in flat(config).items() if key.startswith("data.")}
    held_out = data["data.validation"]
    return data | {"data.validation": held_out if isinstance(held_out, float) else None}


def training_of(trace: Trace) -> dict[str, Any] | None:
    """Return a dict of the configuration keys and values that determine the training losses.

    The seed and the keys of the data are omitted. The result is `None` if the configuration of the
    trace is unknown.
    """
    config = configuration(trace)
    if config is None:
        return None
    values = flat(replace(config, model=with_epsilon(config.model)))
    return {
        key: value
        for key, value in values.items()
        if group_of(key) == WORK and not key.startswith("data.") and key not in _NOT_TRAINING
    }


def setting(load: Mapping[str, Any] | None, kind: str) -> str | None:
    """Describe a workload as text: the trace kind and all settings except the sizes (SIZES).

    `load` is a result of `load_of`, and `kind` is "measured" or "simulated". The result is `None`
    if `load` is `None`.
    """
    if load is None:
        return None
    keys = [f"{key} = {value}" for key, value in load.items() if key not in SIZES]
    return ", ".join([kind, *keys])


def difference_of(load: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """Return a clause that names the keys in which two workloads differ.

    `load` and `other` are results of `load_of`. If they are equal, only one of the runs is
    simulated.
    """
    if load is None or other is None:
        return "the configuration of one of them is unknown"
    keys = [key for key in {**load, **other} if load.get(key) != other.get(key)]
    if not keys:
        return "only one of them is simulated"
    if len(keys) > _KEYS_NAMED:
        keys[_KEYS_NAMED:] = [counted(len(keys) - _KEYS_NAMED, "more key")]
    *others, last = keys
    return f"{', '.join(others)} and {last} differ" if others else f"{last} differs"


def notes(traces: Sequence[Trace], groups: Mapping[str, Sequence[int]]) -> list[str]:
    """Return warnings about the comparability of runs, one line per warning.

    The warnings concern unknown configurations, busy hosts, runs with more ranks than cores, and
    runs that were resumed with another layout. All groups with busy hosts have one line, which
    states the largest share of the CPU time.
    `groups` is a dict from the label of a group of runs to the indices of its runs.
    """
    if len(traces) < 2:
        return []
    members = {label: [traces[index] for index in runs] for label, runs in groups.items()}
    unknown = [label for label, runs in members.items() if configuration(runs[0]) is None]
    missing = f"the configuration of {' and '.join(unknown)} is unknown: no settings are compared"
    line = busy_hosts(max(traces, key=lambda trace: other_cpu_share(trace) or 0))
    warnings = {
        label: [line if any(map(busy_hosts, runs)) else None]
        + [warning(run) for warning in (outnumbered, untimed) for run in runs]
        for label, runs in members.items()
    }
    crowded = shared_warnings(warnings, "groups")
    return [missing, *crowded] if unknown else crowded


def shared_warnings(warnings: Mapping[str, Sequence[str | None]], noun: str = "runs") -> list[str]:
    """Return one line per distinct warning, which begins with the labels of its runs.

    `warnings` is a dict from the label of a run to its warnings, or from the label of a group of
    runs if `noun` is "groups". A warning that is `None` is omitted.
    """
    found: dict[str, list[str]] = {}
    for label, lines in warnings.items():
        for line in dict.fromkeys(filter(None, lines)):
            found.setdefault(line, []).append(label)
    return [f"{_some(labels, len(warnings), noun)}: {line}" for line, labels in found.items()]


def _some(labels: Sequence[str], total: int, noun: str) -> str:
    if len(labels) == total:
        return "all runs"
    return ", ".join(labels) if len(labels) < 4 else f"{len(labels)} of {total} {noun}"


def differing(
    traces: Sequence[Trace],
    groups: Mapping[str, Sequence[int]],
    abouts: Sequence[Mapping[str, str]],
) -> dict[str, dict[str, str]]:
    """Return the differences between runs as a nested dict: result[group][key] is a string.

    The string lists each value of the key and the groups of runs that use this value. If a key,
    such as the seed, differs within a group, the value of the group lists the values of its runs.
    The comparison covers all configuration keys except the names of the run, the number of tokens
    per step, the kind of trace, and the hosts, MPI version and hpc3d version in `abouts`. If a key
    is missing in an older run, the default value is used. If the configuration of any run is
    unknown, no configuration keys are compared.

    Parameters
    ----------
    groups
        Dict from the label of a group of runs to the indices of its runs.
    abouts
        Header of each run's report, as a dict from title to text.
    """
    found: dict[str, dict[str, str]] = {WORK: {}, LAYOUT: {}, EXECUTION: {}}
    if len(traces) < 2:
        return found
    for group, key, values in _compared(traces, abouts):
        if len({*values}) > 1:
            members = [dict.fromkeys(values[index] for index in runs) for runs in groups.values()]
            found[group][key] = _whose([*map(", ".join, members)], groups)
    return found


def _compared(traces, abouts):
    """Yield (group, key, values) for each compared property; `values` has one string per run."""
    configs = [configuration(trace) for trace in traces]
    if None not in configs:
        known = [flat(replace(each, model=with_epsilon(each.model))) for each in configs]
        for key in known[0]:
            if key in ("name", "run.label"):  # names without effect
                continue
            values = [each[key] for each in known]
            texts = ["absent" if value is None else literal(value) for value in values]
            yield group_of(key), key, texts
    tokens = [int(trace.steps["tokens"].max(initial=0)) for trace in traces]
    yield WORK, "tokens a step", [f"{each:,}" for each in tokens]
    yield EXECUTION, "trace", [trace.attrs.get("kind") or "measured" for trace in traces]
    for key in _OF_MACHINE:
        # Replace ";", because `_whose` separates values with it. Omit the number of ranks of a
        # single host, because it is the number of all ranks.
        texts = [re.sub(r"^([^,]*) \(\d+\);", r"\1;", each.get(key, "unknown")) for each in abouts]
        yield EXECUTION, key, [text.replace(";", ",") for text in texts]


def _whose(values, labels):
    """List each value, followed by the runs or groups that use this value.

    If more than _ALWAYS_NAMED of them have the most frequent value, this value comes last, and
    they are not listed.
    """
    found = {}
    for value, label in zip(values, labels):
        found.setdefault(value, []).append(label)
    usual = max(found, key=lambda value: len(found[value]))
    many = len(found[usual]) > _ALWAYS_NAMED
    last = [f"{usual} in all {'others' if len(found) > 1 else 'groups'}"] if many else []
    named = [each for each in found.items() if not (many and each[0] == usual)]
    return "; ".join([*(f"{value} in {' and '.join(names)}" for value, names in named), *last])
