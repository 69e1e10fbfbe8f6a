"""Points of a parameter sweep: all combinations of the axes in table [sweep] of a study file.

A study file is an input file with an additional table:

    [sweep]
    ranks = 4                                   # one value
    seed = [1, 2, 3]                            # an axis: a list of values of a key
    model.hidden = [256, 512]
    layouts = [                                 # an axis of several keys: a list of tables
        { label = "1-D", parallel.scheme = "1d", mesh.x = 4 },
        { label = "2-D", parallel.scheme = "2d-summa", mesh.x = 2, mesh.y = 2 },
    ]
    repetitions = 5

In addition to the keys of an input file, `ranks` is the number of ranks, and `machine` is the
machine on which the point is simulated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from hashlib import sha256
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from hpc3d.config import deprecated_keys
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.input_file import Config
from hpc3d.config.limits import MOST_RANKS
from hpc3d.config.load import (
    flat,
    hint,
    literal,
    option_value,
    options,
    override,
    read,
    validate,
)
from hpc3d.config.package_data import INPUT, find
from hpc3d.config.resolve import refuse, resolve, violated
from hpc3d.console.sanitize import Problems, lines_of
from hpc3d.predict.machine import machine_file

MOST_POINTS = 10_000
# Columns of the tables; axes must not have these names.
COLUMNS = {"point", "repetition", "runs", "loss", "validation_loss", "tokens_per_s"}
COLUMNS |= {"step_s", "step_s_low", "step_s_high", "received_bytes", "peak_bytes"}
_OPTION = "--sweep."
_RANKS, _MACHINE, _REPETITIONS, _LABEL = "ranks", "machine", "repetitions", "label"
_OWN = _RANKS, _MACHINE, _REPETITIONS  # keys of [sweep] that are not keys of an input file
_KEYS = {*flat(Config()), _RANKS, _MACHINE}
_LONGEST = 80  # maximum number of characters of the axes in a name
_DIGITS = 10  # number of hexadecimal digits of a key


class _Choice(NamedTuple):
    """Value of an axis: its text in the tables, and the settings that it applies."""

    text: Any
    settings: dict[str, Any]


class SweepPoint(NamedTuple):
    """One run of a sweep.

    `key` is a hash of everything that affects the result, and identifies the run folder of the
    point. `values` maps each axis to its value, and `settings` maps the keys that the axes set to
    their values. The point is simulated if `machine` is not `None`.
    """

    number: int
    key: str
    values: dict[str, Any]
    settings: dict[str, Any]
    repetition: int
    config: Config

    @property
    def ranks(self) -> int:
        return self.config.grid().size

    @property
    def machine(self) -> str | None:
        return self.settings.get(_MACHINE)

    @property
    def name(self) -> str:
        """File name without suffix: the values of the axes, followed by the key."""
        words = (f"{axis.rpartition('.')[2]}{value}" for axis, value in self.values.items())
        readable = re.sub(r"[^\w.+-]+", "_", "-".join(words), flags=re.ASCII)
        return f"{readable[:_LONGEST]}-{self.key}"

    @property
    def label(self) -> str | None:
        """Name in reports: the values of the axes that set several keys, or run.label."""
        labels = (value for axis, value in self.values.items() if axis not in _KEYS)
        return ", ".join(labels) or self.config.run.label

    def __str__(self) -> str:
        return _described(self.values, self.repetition)


def _described(values: Mapping[str, Any], repetition: int) -> str:
    words = [f"{axis}={value}" for axis, value in values.items()]
    return " ".join([*words, *[f"repetition={repetition}"] * bool(repetition)]) or "no axes"


def points_of(study: Path | str, words: Sequence[str]) -> list[SweepPoint]:
    """Return all points of a study. The last axis varies fastest, followed by the repetitions.

    Parameters
    ----------
    study
        Path of the study file.
    words
        Command-line options `--section.key VALUE`, and `--sweep.KEY A,B,C` for axes.

    Raises
    ------
    ValueError
        If an axis or a point is invalid; the message has one line per error.
    """
    tree, table = _read(study, words)
    repetitions = table.pop(_REPETITIONS, 1)
    axes = _axes(table, repetitions)
    refuse([*_without_effect(words, axes)])
    found: list[SweepPoint] = []
    problems: dict[str, dict[str, None]] = {}
    for choices in product(*axes.values()):
        values = dict(zip(axes, (choice.text for choice in choices)))
        settings = {key: value for choice in choices for key, value in choice.settings.items()}
        try:
            for repetition in range(repetitions):
                found.append(_point(len(found), values, settings, repetition, tree))
        except ValueError as error:
            where = _described({axis: values[axis] for axis in values if axis != "seed"}, 0)
            for line in lines_of(error):
                problems.setdefault(line, {})[where] = None
    refuse([*_located(problems, bool(found))])
    if len({point.key for point in found}) < len(found):
        raise ValueError("sweep: name and run.* do not change a result; remove these axes")
    return found


def _read(study: Path | str, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of the input file and the keys of [sweep], both with the options applied."""
    tree, rest = read(find(study, INPUT)), []
    table = dict(_flat(_table(tree.pop("sweep", {}))))
    for option, text in options(words):
        if option.startswith(_OPTION):
            table[option.removeprefix(_OPTION)] = _listed(option, text)
        else:
            rest.append(f"{option}={text}")
    if not table:
        raise ValueError(f"{study}: no axes; add a table [sweep], or options --sweep.KEY A,B,C")
    deprecated_keys.warn(override(tree, rest))
    return tree, table


def _without_effect(words: Sequence[str], axes: Mapping[str, Sequence[_Choice]]) -> Iterator[str]:
    """Yield an error for each option `--section.key VALUE` whose key is set by an axis."""
    pairs = [pair for pair in options(words) if not pair[0].startswith(_OPTION)]
    keys, _ = deprecated_keys.rename_options([option[2:] for option, _ in pairs])
    for (option, text), key in zip(pairs, keys, strict=True):
        given, remedy = f"{option} {text}", f"use {_OPTION}{key} {text}"
        setting = (axis for axis in axes if any(key in each.settings for each in axes[axis]))
        if axis := next(setting, None):
            remedy = remedy if axis == key else f"change sweep.{axis}"
            yield f"{given}: the axis sweep.{axis} sets this key; {remedy}"
        elif key in _OWN:
            yield f"{given}: not a key of an input file; {remedy}"


def _located(problems: Mapping[str, Collection[str]], some_valid: bool) -> Iterator[str]:
    """Yield each problem once per point in which it occurs, or only once if it occurs in all."""
    count = len({where for places in problems.values() for where in places})
    for line, places in problems.items():
        if len(places) == count and not some_valid:
            yield line
        else:
            yield from (f"{where}: {line}" for where in places)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("sweep: must be a table; write its keys below a line [sweep]")
    return value


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested tables: { mesh = { x = 4 } } yields ("mesh.x", 4)."""
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and name not in _KEYS:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _listed(option: str, text: str) -> Any:
    """Convert the value of an option --sweep.KEY: a TOML value, or values separated by commas."""
    value = option_value(text)
    if value == text and text.startswith("[") and isinstance(option_value(f"[{text}]"), list):
        raise ValueError(f"{option} {text}: write a list of lists as '[{text}]'")
    return [option_value(each) for each in text.split(",")] if value == text else value


def _axes(table: Mapping[str, Any], repetitions: Any) -> dict[str, list[_Choice]]:
    """Return the choices of each axis. Raises Problems with one line per invalid axis."""
    axes, problems = {}, []
    for name, values in table.items():
        try:
            axes[name] = _choices(name, values if isinstance(values, list) else [values])
        except ValueError as error:
            problems += lines_of(error)
    for one, other in combinations(axes, 2):
        keys = [{key for choice in axes[name] for key in choice.settings} for name in (one, other)]
        problems += [
            f"sweep.{one} and sweep.{other} both set {key}; remove one of them"
            for key in sorted(keys[0] & keys[1])
        ]
    if not isinstance(repetitions, int) or repetitions is True or repetitions < 1:
        problems.append(f"sweep.{_REPETITIONS} = {repetitions!r}: must be a positive integer")
    elif (count := repetitions * prod(map(len, axes.values()))) > MOST_POINTS:
        problems.append(f"sweep: {count} points, but at most {MOST_POINTS}; shorten an axis")
    refuse(problems)
    return axes


def _choices(name: str, values: Sequence[Any]) -> list[_Choice]:
    where = f"sweep.{name}"
    if not values:
        raise ValueError(f"{where}: the list is empty; add a value, or remove the axis")
    if name in _KEYS:
        found = [_Choice(_text(value), {name: value}) for value in values]
    elif all(isinstance(value, dict) for value in values):
        if name in COLUMNS or not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"{where}: this name is reserved or invalid; rename the axis")
        found = [_several_keys(where, dict(_flat(value))) for value in values]
    else:
        raise ValueError(f"{where}: unknown key; {hint(name, more=_OWN)}")
    for number, choice in enumerate(found):
        if choice.settings in [other.settings for other in found[:number]]:
            raise ValueError(f"{where}: {choice.text} occurs twice; remove one of them")
        if choice.text in [other.text for other in found[:number]]:
            raise ValueError(f"{where}: two tables have the label {choice.text}; rename one")
    return found


def _several_keys(where: str, table: dict[str, Any]) -> _Choice:
    label = table.pop(_LABEL, None)
    refuse([f"{where}: {key}: unknown key; {hint(key)}" for key in table if key not in _KEYS])
    short = (f"{key.rpartition('.')[2]}={_text(value)}" for key, value in table.items())
    return _Choice(" ".join(short) if label is None else str(label), table)


def _text(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else literal(value)


def _point(
    number: int,
    values: dict[str, Any],
    settings: dict[str, Any],
    repetition: int,
    study: dict[str, Any],
) -> SweepPoint:
    """Return the point with these settings. Raises ValueError if its configuration is invalid."""
    tree, keys = deepcopy(study), dict(settings)
    ranks, machine = keys.pop(_RANKS, None), keys.pop(_MACHINE, None)
    override(tree, [f"--{key}={literal(value)}" for key, value in keys.items()])
    refuse([*_wrong_pair(ranks, machine)])
    config = validate(tree, rules=partial(violated, ranks=ranks))
    if ranks is None and {config.mesh.x, config.mesh.y, config.mesh.z} == {None}:
        raise ValueError("the number of ranks is unknown; set sweep.ranks, or mesh.x, y and z")
    config = resolve(config, ranks)
    if machine is None:
        refuse([*untrainable(config), *_wrong_trace(config)])
    kept = {key: value for key, value in tree.items() if key not in ("name", "run")}
    content = json.dumps([kept, ranks, machine, repetition], sort_keys=True, default=str)
    key = sha256(content.encode()).hexdigest()[:_DIGITS]
    return SweepPoint(number, key, values, settings, repetition, config)


def _wrong_pair(ranks: Any, machine: Any) -> Iterator[str]:
    known = isinstance(ranks, int) and ranks is not True and 1 <= ranks <= MOST_RANKS
    if ranks is not None and not known:
        yield f"ranks = {ranks!r}: must be an integer from 1 to {MOST_RANKS}"
    if machine is not None:
        try:
            machine_file.load(str(machine))
        except Problems as error:
            yield from error.lines
        except ValueError as error:
            yield f"machine = {error}"


def _wrong_trace(config: Config) -> Iterator[str]:
    if not config.trace.enabled:
        yield "trace.enabled = false: a sweep reads the trace of each run; remove the key"
