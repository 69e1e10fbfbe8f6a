"""Verdict of a comparison of runs: which run is faster, and whether the losses agree.

Runs that differ only in their seed form a group. As in the summary of a sweep, the step time of a
run is its median over the steps, each seed contributes one sample, the mean over its runs, and the
step time of a group is the mean over its samples. With a single seed, each run is a sample. The
rate of a group is its work per step divided by its step time. The mean is arithmetic for times and
thus harmonic for rates (Hoefler and Belli, SC 2015, rule 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import exp
from typing import Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.compare import (
    FEWEST,
    LOAD,
    MODEL,
    half_width,
    interval,
    kind_of_scaling,
    relative_error,
)
from hpc3d.analyze.metrics.loads import difference_of
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.step import ratio
from hpc3d.config.load import flat
from hpc3d.console.sanitize import counted
from hpc3d.trace.reader import Trace

_Row = Mapping[str, Any]
_Samples = Sequence[Sequence[np.ndarray]]  # step times of each run of each sample
_UNCOMPARED = ("name", "run.out", "run.label")  # keys in which equal runs may differ
_MOST_KEYS = 4  # maximum number of keys that distinguish the labels of runs
_MESH = ("layout", "ranks", "p", "d")  # columns that identify the layout of a run
_TIMES = ("forward_s", "backward_s", "average_step_s", "step_s")
_RATES = ("tokens_per_s", "tokens_per_s_rank", "flop_per_s")
_SPEEDUP = ("speedup", "speedup_low", "speedup_high")
_PEERS = ("ranks", "p", "d", *LOAD)
_ROUNDING = 1e-5  # losses agree if they differ by at most this fraction
_TWICE = 2.0  # from this ratio on, the verdict states a ratio instead of a percentage


class SeedGroup(NamedTuple):
    """Runs that differ only in their seed, as run indices.

    Attributes
    ----------
    label
        Label of the run, or of the group if it has several runs.
    seeds
        Dict from seed to the runs with this seed.
    reference
        Index of the group with which this group is compared. See `with_references`.
    other_data
        Clause that names the keys in which its training data differ from those of the reference
        group, or "".
    other_training
        Clause that names the other keys in which its training differs from that of the reference
        group, such as the learning rate or the seed, or "".
    comparable
        Whether the reference group has the same model size and the same training data, so that
        the losses can be subtracted.
    """

    label: str
    seeds: dict[int | None, list[int]]
    reference: int = 0
    other_data: str = ""
    other_training: str = ""
    comparable: bool = True

    @property
    def runs(self) -> list[int]:
        """Return all runs of the group."""
        return [index for runs in self.seeds.values() for index in runs]

    @property
    def size(self) -> str:
        """Return the number of seeds, and of runs if a seed has several; "" for a single run."""
        seeds, runs = len(self.seeds), len(self.runs)
        parts = [f"{seeds} seeds"] * (seeds > 1) + [f"{runs} runs"] * (runs > seeds)
        return ", ".join(parts)

    def samples(self, seconds: Sequence[np.ndarray]) -> _Samples:
        """Return the times of each run of each sample, where `seconds` has one array per run."""
        several = len(self.seeds) > 1
        runs = self.seeds.values() if several else [[index] for index in self.runs]
        return [[seconds[index] for index in each] for each in runs]


def seed_groups(
    traces: Sequence[Trace], labels: Sequence[str], layouts: Sequence[str]
) -> list[SeedGroup]:
    """Return the groups of runs that differ only in their seed.

    A run with an unknown configuration is a group of its own. `labels` are the unique labels of
    the runs, which name groups of one run. Other groups are named by their entry of `layouts`, and
    by the keys in which they differ from groups with the same layout.
    """
    found: dict[Any, dict[int | None, list[int]]] = {}
    known: dict[Any, dict[str, Any]] = {}
    for index, trace in enumerate(traces):
        settings = _settings(trace)
        seed = settings.pop("seed", None)
        key = str((settings or index, trace.attrs["world_size"]))
        known[key] = settings
        found.setdefault(key, {}).setdefault(seed, []).append(index)
    groups = {key: SeedGroup("", seeds) for key, seeds in found.items()}
    names = {key: layouts[group.runs[0]] for key, group in groups.items()}
    for key, group in groups.items():
        label = labels[group.runs[0]]
        if len(group.runs) > 1:
            equal = [known[other] for other, name in names.items() if name == names[key]]
            label = f"{', '.join([names[key], *_differing(known[key], equal)])} ({group.size})"
        groups[key] = group._replace(label=label)
    return [*groups.values()]


def _settings(trace: Trace) -> dict[str, Any]:
    """Return the configuration of a run and the kind of its trace; empty if it is unknown."""
    config = configuration(trace)
    if config is None:
        return {}
    settings = {key: each for key, each in flat(config).items() if key not in _UNCOMPARED}
    return settings | {"kind": trace.attrs.get("kind")}


def distinct_labels(
    traces: Sequence[Trace], labels: Sequence[str], run_ids: Sequence[str]
) -> list[str]:
    """Return unique labels: runs with equal labels are also named by the keys that differ.

    If more than _MOST_KEYS keys or none differ, the run id is appended instead, and a number if
    the run ids are equal, too.
    """
    known, named = [*map(_settings, traces)], []
    for label, settings in zip(labels, known):
        equal = [other for other, name in zip(known, labels) if name == label]
        keys = [*_differing(settings, equal)]
        named.append(", ".join([label, *keys]) if len(keys) <= _MOST_KEYS else label)
    for ids in (run_ids, range(1, len(labels) + 1)):
        named = [
            f"{name}, {each}" if named.count(name) > 1 else name for name, each in zip(named, ids)
        ]
    return named


def _differing(settings: _Row, groups: Sequence[_Row]) -> Iterator[str]:
    """Yield the settings that differ between the groups, such as hidden=64."""
    for key, value in settings.items():
        if any(other.get(key) != value for other in groups):
            yield f"{key.rpartition('.')[2]}={value}"


def with_references(
    groups: Sequence[SeedGroup],
    runs: Sequence[_Row],
    data: Sequence[_Row | None],
    training: Sequence[_Row | None],
) -> list[SeedGroup]:
    """Choose the group with which each group is compared, and whether its losses are comparable.

    The reference is the first group if it does the same work. Otherwise, it is the first group
    that does the same work and has the layout of the first group. If none does, it is the first
    group in weak scaling (the same work per rank), and otherwise the first group that does the
    same work. A group that is chosen for others is not compared. An unknown size or text does not
    differ from any other. `runs` are the results of `run_row`, `data` those of `data_of`, and
    `training` those of `training_of`.
    """
    firsts = [runs[group.runs[0]] for group in groups]
    found = []
    for run in firsts:
        kinds = [kind_of_scaling(other, run) for other in firsts]
        same = [index for index, kind in enumerate(kinds) if kind == "strong"]
        changed = [
            any(firsts[index].get(key) != firsts[0].get(key) for key in _MESH) for index in same
        ]
        weak = kinds[0] != "other" and (_same_size(run, firsts[0]) or all(changed))
        found.append(0 if weak or len(same) < 2 else same[changed.index(min(changed))])
    seeded = [_seeded(training[group.runs[0]], group) for group in groups]
    return [
        group._replace(
            reference=each,
            other_data=texts,
            other_training=_other(seeded[index], seeded[each]),
            comparable=not texts and same,
        )
        for index, (group, each) in enumerate(zip(groups, found))
        for texts in [_other(data[group.runs[0]], data[groups[each].runs[0]])]
        for same in [_same_size(firsts[index], firsts[each])]
    ]


def _seeded(training: _Row | None, group: SeedGroup) -> _Row | None:
    return training and {"seed": {*group.seeds}, **training}


def _other(own: _Row | None, first: _Row | None) -> str:
    return difference_of(own, first) if own and first and own != first else ""


def _same_size(own: _Row, first: _Row) -> bool:
    pairs = [(own[key], first[key]) for key in MODEL]
    return all(None in pair or len({*pair}) == 1 for pair in pairs)


def loss_references(groups: Sequence[SeedGroup]) -> dict[int, int | None]:
    """Return the run with which the losses of each run are compared, or None, by run index.

    It is the run of the reference group that has the same seed, if the losses of the groups are
    comparable. An unknown seed does not differ from any other.
    """
    found: dict[int, int | None] = {}
    for group in groups:
        others = groups[group.reference]
        for seed, members in group.seeds.items():
            unknown = None in (seed, *others.seeds)
            equal = others.runs if unknown else others.seeds.get(seed, [None])
            found |= dict.fromkeys(members, equal[0] if group.comparable else None)
    return found


def repeated_seeds(groups: Sequence[SeedGroup], labels: Sequence[str]) -> Iterator[str]:
    """Yield one line if any group of several seeds contains several runs with one seed."""
    several = [group for group in groups if len(group.seeds) > 1]
    runs = [runs for group in several for runs in group.seeds.values() if len(runs) > 1]
    if runs:
        (first, again), count = runs[0][:2], sum(map(len, runs)) - len(runs)
        total = f" ({count} repeated runs in total)" if count > 1 else ""
        yield (
            f"{labels[again]} repeats the configuration and seed of {labels[first]}{total}: the"
            " runs of a seed count as one sample"
        )


def early_ends(runs: Sequence[_Row], last_steps: Sequence[int | None]) -> Iterator[list[str]]:
    """Yield a list for each run, with a warning if it ends before others.

    `runs` is the result of `comparison_rows`, and `last_steps` has the last step of each run.
    """
    step, several = runs[0]["loss_step"], len({*last_steps}) > 1
    line = f"the last step is {step}, so the losses of all runs are compared there"
    yield from ([line] * (step is not None and several and last == step) for last in last_steps)


def speed_rows(
    runs: Sequence[_Row],
    seconds: Sequence[np.ndarray],
    groups: Sequence[SeedGroup],
    busy: Sequence[float | None],
    loads: Sequence[Mapping[str, Any] | None],
) -> list[dict[str, Any]]:
    """Compare the step time of each group with its reference group.

    Each row has the label `run`, the number of `ranks`, the kind of `scaling`, and the `speedup`
    over the reference with its 95 % confidence interval; `few` is the reason if it has none. The
    speedup is the ratio of step times for equal work, the ratio of FLOP/s for equal work per rank
    on another number of ranks, and None otherwise. `difference` names the differences in work.

    Parameters
    ----------
    runs
        Results of `run_row`, one per run.
    seconds
        Step times of the slowest rank in seconds, one array per run.
    busy
        Share of the CPU time that other processes used during each run, if known. `noise` is the
        largest share of the runs of a group and of its reference.
    loads
        Workload of each run (`load_of`), or None if it is unknown.
    """
    rows = []
    for group in groups:
        others = groups[group.reference]
        first, run = runs[others.runs[0]], runs[group.runs[0]]
        kind = kind_of_scaling(run, first)
        work = 1.0 if kind == "strong" else None
        if kind == "weak" and run["ranks"] != first["ranks"]:
            work = ratio(*(_work(each, "flop_per_s") for each in (run, first)))
        row = {"run": group.label, "ranks": run["ranks"], "scaling": kind}
        row["few"] = _too_few(group, others)
        row["noise"] = max(busy[index] or 0.0 for index in (*group.runs, *others.runs))
        row["difference"] = difference_of(loads[others.runs[0]], loads[group.runs[0]])
        times = others.samples(seconds), group.samples(seconds)
        rows.append(row | _time_ratio("speedup", *times, work))
    return rows


def _too_few(*groups: SeedGroup) -> str:
    """Return the reason why the ratio of the step times of groups can have no interval."""
    counts = [
        (len(each.seeds), "seeds") if len(each.seeds) > 1 else (len(each.runs), "runs")
        for each in groups
    ]
    number, noun = min(counts)
    return "too few steps" if number == 1 else f"{number} {noun} are too few"


def _work(run: _Row, rate: str) -> float | None:
    """Return the work per step: a rate of the run times its step time."""
    return None if run[rate] is None else run[rate] * run["step_s"]


def _time_ratio(
    key: str, first: _Samples, others: _Samples, work: float | None = 1.0
) -> dict[str, float | None]:
    """Return the ratio of the step times of two groups times `work`, and its confidence interval.

    If both groups have at least FEWEST samples, the interval is Welch's interval of the difference
    of the logarithms of the means, where the standard error of a logarithm is the relative
    standard error of the mean. If one of them has a single sample, it is the interval of the ratio
    of the medians over all steps. Two samples are too few for a useful interval.
    """
    means = [
        np.array([np.mean([np.median(run) for run in sample]) for sample in group])
        for group in (first, others)
    ]
    before, after = (float(each.mean()) for each in means)
    speedup, samples = ratio(work and work * before, after), min(map(len, means))
    if 1 < samples < FEWEST:
        return {key: speedup} | interval(key, None)
    if speedup is None or samples == 1:
        errors = (relative_error(_pooled(each)) for each in (first, others))
        return {key: speedup} | interval(key, speedup, *errors)
    margin = half_width(means[0] / before, means[1] / after)
    limits = {f"{key}_low": speedup * exp(-margin), f"{key}_high": speedup * exp(margin)}
    return {key: speedup, **limits}


def _pooled(samples: _Samples) -> np.ndarray:
    return np.concatenate([run for sample in samples for run in sample])


def scaling_table(
    runs: Sequence[dict[str, Any]], groups: Sequence[SeedGroup], speeds: Sequence[_Row]
) -> list[dict[str, Any]]:
    """Return one row per group, with its speedup and efficiency over its reference group.

    If a group is compared with a group other than the first one, the column `reference` contains
    the label of the reference group. If all groups have as many ranks, the table has no scaling.
    """
    rows, several = [], any(group.reference for group in groups)
    for group, speed in zip(groups, speeds):
        first, reference = runs[group.runs[0]], groups[group.reference]
        row = first | {key: _mean(_means(runs, group, key)) for key in _TIMES}
        row |= {key: ratio(_work(first, key), row["step_s"]) for key in _RATES}
        row |= {key: speed[key] for key in ("run", "scaling", *_SPEEDUP)}
        row |= dict.fromkeys(_SPEEDUP[1:]) if group is reference else {}
        row["reference"] = reference.label if several else None
        ranks = row["ranks"] / runs[reference.runs[0]]["ranks"]
        rows.append(row | {"efficiency": ratio(row["speedup"], ranks)})
    if len({row["ranks"] for row in rows}) > 1:
        return rows
    return [row | {"scaling": None, "efficiency": None} for row in rows]


def gain_rows(
    rows: Sequence[_Row], groups: Sequence[SeedGroup], times: Mapping[str, Sequence[np.ndarray]]
) -> list[dict[str, Any]]:
    """Return the speedup of each group over 1-D and 2-D tensor parallelism.

    over_1d is the average step time of the best 1-D group divided by the average step time of this
    group; over_2d is the same ratio for the best 2-D group. arXiv:2105.14450 reports ratios of
    2.32 and 1.57 for 3-D on 64 ranks. step_over_1d and step_over_2d are the ratios of complete
    step times. Only groups with the same model, batch size and number of ranks, stages and
    replicas are compared. Each ratio has a 95 % confidence interval. The result is empty if no two
    comparable groups differ in their scheme.

    Parameters
    ----------
    rows
        Result of `scaling_table`, one row per group.
    times
        Step times (step_s) and times of the passes (average_step_s), one array per run.
    """
    found = [
        {**row, **_gains(number, rows, groups, times)}
        for number, row in enumerate(rows)
        if row["family"]
    ]
    return found if any(row[key] for row in found for key in ("over_1d", "over_2d")) else []


def _gains(number, rows, groups, times):
    """Return the speedups of a group over the best comparable 1-D and 2-D groups."""
    own, gains = rows[number], {}
    peers = [
        other for other, row in enumerate(rows) if all(row[key] == own[key] for key in _PEERS)
    ]
    for family, key in product(("1d", "2d"), ("average_step_s", "step_s")):
        name = f"over_{family}" if key == "average_step_s" else f"step_over_{family}"
        others = [other for other in peers if rows[other]["family"] == family != own["family"]]
        known = [other for other in others if None not in (rows[other][key], own[key])]
        best = min(known, key=lambda other: rows[other][key], default=number)
        samples = (groups[each].samples(times[key]) for each in (best, number))
        gains |= _time_ratio(name, *samples, work=1.0 if known else None)
    return gains


def _mean(values: Mapping[int | None, float]) -> float | None:
    return float(np.mean([*values.values()])) if values else None


def seed_rows(runs: Sequence[_Row], groups: Sequence[SeedGroup]) -> list[dict[str, Any]]:
    """Return one row per group of several seeds: mean loss and its 95 % confidence interval.

    `runs` is the result of `comparison_rows`. The losses are those after `loss_step` and
    `validation_step`. The interval is Student's t interval of the mean over the seeds.
    """
    rows = []
    for group in groups:
        if len(group.seeds) == 1:
            continue
        row: dict[str, Any] = {"run": group.label, "runs": len(group.seeds)}
        for key, step in (("loss", "loss_step"), ("validation_loss", "validation_step")):
            row[step] = runs[group.runs[0]][step]
            means = _means(runs, group, key)
            row[key] = _mean(means)
            row[f"{key}_half"] = half_width(np.array([*means.values()])) if means else None
        rows.append(row)
    return rows


def _means(runs: Sequence[_Row], group: SeedGroup, key: str) -> dict[int | None, float]:
    """Return the mean over the runs of each seed, or an empty dict if any value is unknown."""
    if any(runs[index][key] is None for index in group.runs):
        return {}
    return {
        seed: float(np.mean([runs[index][key] for index in each]))
        for seed, each in group.seeds.items()
    }


def comparison_verdict(
    speeds: Sequence[_Row], runs: Sequence[_Row], groups: Sequence[SeedGroup]
) -> Iterator[str]:
    """Yield one line per group that is compared with its reference: step time and losses.

    If several runs are a single group, yield a line that says so.

    Parameters
    ----------
    speeds
        Result of `speed_rows`, or an empty list if times are not compared.
    runs
        Result of `comparison_rows`.
    """
    if len(groups) == 1 < len(runs):
        yield "; ".join(_of_one_group(groups[0], runs))
    for number, group in enumerate(groups):
        if number == group.reference:
            continue
        parts, reference = list[str](), groups[group.reference]
        if speeds:
            parts = [_clause(speeds[number], speeds[group.reference]), *_noise(speeds[number])]
        parts += _group_losses(group, reference, runs)
        if parts:
            label = "" if speeds else f"{group.label}: "
            yield label + "; ".join(parts)


def _group_losses(group: SeedGroup, reference: SeedGroup, runs: Sequence[_Row]) -> Iterator[str]:
    """Yield a clause on the losses of a group and of its reference, if they are known."""
    first, several = runs[group.runs[0]], max(len(group.seeds), len(reference.seeds)) > 1
    means = [_means(runs, each, "loss") for each in (reference, group)]
    if group.other_data and all(means):
        reason = f"trained on different data: {group.other_data}"
        yield f"the losses are not compared, because the runs {reason}"
    elif several or first["loss_difference"] is None:
        yield from _mean_losses(*means, group, first["loss_step"])
    else:
        yield from _losses(first, group.other_training)


def _of_one_group(group: SeedGroup, runs: Sequence[_Row]) -> Iterator[str]:
    """Yield the reason why all runs are one group, and how far their losses agree."""
    if len(group.seeds) > 1:
        yield "all runs differ only in their seed, so they are one group"
        return
    yield "all runs have the same configuration and seed, so they are one group"
    known = [row for row in runs[1:] if row["loss_difference"] is not None]
    if known:
        yield from _losses(max(known, key=lambda row: row["loss_difference"]))


def _clause(row: _Row, first: _Row) -> str:
    one, other, speedup = row["run"], first["run"], row["speedup"]
    if speedup is None:
        reason = f"because {row['difference']}"
        return f"the step times of {one} and {other} are not compared, {reason}"
    low, high = row["speedup_low"], row["speedup_high"]
    same = low is not None and low <= 1 <= high
    factor, none = f"{_ratio(speedup)} times", f"({row['few']} for an interval)"
    within = none if low is None else f"(95 % interval {_ratio(low)} to {_ratio(high)})"
    if row["scaling"] == "weak":
        noise = f"the FLOP/s of {one} and {other} do not differ significantly: {factor} {within}"
        return noise if same else f"{one} reaches {factor} the FLOP/s of {other} {within}"
    if row["ranks"] != first["ranks"] or max(speedup, 1 / speedup) >= _TWICE:
        ranks = f" on {counted(row['ranks'], 'rank')} instead of {first['ranks']}"
        equal = f"{other}{ranks if row['ranks'] != first['ranks'] else ''}"
        times = f"{factor} as fast"
        if same:
            return f"{_insignificant(one, equal)}: {times} {within}"
        return f"{one} is {times} as {equal} {within}"
    sign = 1 if speedup >= 1 else -1
    more = f"{speedup**sign - 1:.1%} {'faster' if speedup >= 1 else 'slower'}"
    if low is not None:
        least, most = sorted(limit**sign - 1 for limit in (low, high))
        within = f"(95 % interval {least:.1%} to {most:.1%})"
    if same:
        return f"{_insignificant(one, other)}: {more} {within}"
    return f"{one} is {more} than {other} {within}"


def _insignificant(one: str, other: str) -> str:
    return f"{one} is not significantly faster or slower than {other}"


def _noise(row: _Row) -> Iterator[str]:
    """Yield a warning if other processes can explain the difference.

    If they use a share s of the CPU time, a step takes up to 1 / (1 - s) times as long.
    """
    speedup, noise = row["speedup"], row["noise"]
    if speedup is not None and 1 - min(speedup, 1 / speedup) < noise:
        yield f"other processes used {noise:.0%} of the CPU time, which can cause this difference"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"


def _losses(row: _Row, cause: str = "") -> Iterator[str]:
    """Yield a clause on the losses at the steps that both runs have in common, if any.

    `cause` names the keys that explain a difference, or is "".
    """
    difference, loss = row["loss_difference"], row["loss"]
    if difference is None:
        return
    losses = f"losses up to step {row['difference_step']}"
    if difference == 0:
        yield f"{losses} agree to the last bit"
    elif loss is not None and difference <= _ROUNDING * abs(loss):
        yield f"{losses} agree to {difference:.0e} nat"
    else:
        yield f"{losses} differ by up to {difference:.2g} nat"
        yield from _expected(cause)


def _expected(cause: str) -> Iterator[str]:
    if cause:
        yield f"a difference is expected, because {cause}"


def _mean_losses(
    first: Mapping[int | None, float],
    others: Mapping[int | None, float],
    group: SeedGroup,
    step: int,
) -> Iterator[str]:
    """Yield a clause on the losses of two groups of seeds after a step, if all are known.

    `others` are the losses of `group`, and `first` those of its reference. Losses of models of
    different sizes are not said to agree.

    If both groups have the same seeds, the interval is Student's t interval of the mean of the
    paired differences, unless all differences are rounding errors. Otherwise, it is Welch's
    interval of the difference of the means.
    """
    if not first or not others:
        return
    samples = [np.array([*each.values()]) for each in (first, others)]
    one, other = (float(sample.mean()) for sample in samples)
    means = f"loss {other:.4f} instead of {one:.4f} nat after step {step}"
    if max(len(first), len(others)) > 1:
        means = f"mean {means}"
    if min(len(first), len(others)) == 1:
        yield f"{means} (too few seeds for an interval)"
        yield from _expected(group.other_training)
        return
    paired = first.keys() == others.keys()
    if paired:
        samples = [np.array([others[seed] - loss for seed, loss in first.items()])]
        if (largest := abs(samples[0]).max()) <= _ROUNDING * abs(one):
            exactly = f"to {largest:.0e} nat" if largest else "to the last bit"
            yield f"the losses of each seed after step {step} agree {exactly}"
            return
    difference, margin = other - one, half_width(*samples)
    low, high = difference - margin, difference + margin
    kind = "paired difference" if paired else "difference"
    agree = group.comparable and low <= 0 <= high
    same = "the losses agree within the noise of the seeds: " if agree else ""
    yield f"{same}{means} (95 % interval of the {kind} {low:.2g} to {high:.2g})"
    yield from _expected("" if agree else group.other_training)
