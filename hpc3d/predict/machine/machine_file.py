"""Read, validate and write machine files in TOML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from hpc3d.config import deprecated_keys
from hpc3d.config.load import literal, read
from hpc3d.config.package_data import MACHINE, find
from hpc3d.console.sanitize import Problems, as_written, counted
from hpc3d.predict.machine.collective_costs import ALGORITHMS, Protocol
from hpc3d.predict.machine.machine import (
    TYPES,
    AttentionRates,
    CallTable,
    Errors,
    Link,
    Machine,
    Rates,
)

_RENAMED = {"wake_s": "wakeup_s", "widest_head": "max_fused_head_dim"}  # maps old keys to new keys
_OWN = "name", "errors"  # keys that a machine does not inherit
_LONGEST, _SLOWEST = 10.0, 1.0  # maximum time in s, and minimum rate in 1/s
_PARTS = {
    "gemm": Rates,
    "links": Link,
    "measured": CallTable,
    "attention": AttentionRates,
    "protocols": Protocol,
    "errors": Errors,
}


def load(path: Path | str) -> Machine:
    """Load a Machine from a TOML file, or by its name if it comes with hpc3d.

    Raises ValueError with one line per error; each line states the file, the key and the fix.
    """
    found = find(path, MACHINE)
    tree = _tree(found)
    try:
        return _validate(tree)
    except Problems as problems:
        raise Problems(f"{found}: {line}" for line in problems.lines) from None


def _tree(path: Path, users: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the tables of a machine file, including those of the machine that it names in `like`.

    `users` are the files that refer to this one.
    """
    if path.resolve() in users:
        raise ValueError(f"{path}: `like` leads back to this file; remove `like` from one file")
    if not (tree := read(path)):
        raise ValueError(f"{path}: the file is empty; specify another machine file")
    deprecated_keys.warn(deprecated_keys.rename_keys(tree, _RENAMED))
    if (like := tree.pop("like", None)) is None:
        return tree
    if not isinstance(like, str):
        raise ValueError(f"{path}: like = {like!r}: must be the name or the file of a machine")
    try:
        there = find(like, MACHINE)
    except ValueError as error:
        raise ValueError(f"{path}: like = {error}") from None
    base = _tree(there, (*users, path.resolve()))
    return _merged({key: base[key] for key in base if key not in _OWN}, tree)


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables in which `changes` replace the values and lists of `base`."""
    merged = dict(base)
    for key, value in changes.items():
        known = base.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        merged[key] = _merged(known, value) if both else value
    return merged


def dumps(machine: Machine) -> str:
    """Serialize `machine` to TOML text, which `load` can read."""
    tree = asdict(machine)
    gemm, links, kernels = map(tree.pop, ("gemm", "links", "kernels"))
    lists = {name: tree.pop(name) for name in ("measured", "attention", "protocols", "errors")}
    parts = [_table("", tree)]
    parts += [_table(f"[gemm.{_key(dtype)}]", rates) for dtype, rates in gemm.items()]
    parts += [_table("[[links]]", link) for link in links]
    parts += [_table("[kernels]", kernels)] if kernels else []
    parts += [_table(f"[[{name}]]", each) for name, tables in lists.items() for each in tables]
    return "\n".join(parts)


def _table(head: str, values: Mapping[str, Any]) -> str:
    lines = [f"{_key(name)} = {literal(value)}" for name, value in values.items()]
    return "\n".join([*([head] if head else []), *lines, ""])


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)


def _validate(tree: dict[str, Any]) -> Machine:
    """Convert nested TOML tables to a Machine.

    Raises ValueError with one line per error; each line states the key and the fix.
    """
    import json

    from pydantic import TypeAdapter, ValidationError

    # Strict mode is needed so that pydantic does not accept `true` as a number. In strict mode,
    # pydantic can convert tables to dataclasses only if the input is JSON.
    text = json.dumps(tree, default=str)
    try:
        machine = TypeAdapter(Machine).validate_json(text, strict=True)
    except ValidationError as errors:
        raise Problems(map(_explain, errors.errors())) from None
    found = *_wrong_numbers(machine), *_wrong_rates(machine), *_wrong_links(machine)
    found += *_wrong_tables(machine), *_wrong_attention(machine), *_wrong_protocols(machine)
    found += *_wrong_errors(machine), *_wrong_overlap(machine)
    if found:
        raise Problems(found)
    return machine


def _explain(error: Mapping[str, Any]) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{key}: missing; add it"
    if error["type"] == "unexpected_keyword_argument":
        return f"{key}: unknown key; {_hint(*error['loc'])}"
    reason = error["msg"].lower().replace("an object", "a table")
    return f"{key}: {reason}, not {as_written(error['input'])}; correct the value"


def _hint(*key: str) -> str:
    known = [each.name for each in fields(_PARTS[key[0]] if len(key) > 1 else Machine)]
    known += ["like"] if len(key) == 1 else []
    near = get_close_matches(key[-1], known, 1)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"


def _wrong_numbers(machine: Machine) -> Iterator[str]:
    if not (machine.name.strip() and machine.name.isprintable()):
        yield f"name = {machine.name!r}: must be one nonempty line of printable characters"
    if machine.ranks_per_node < 1:
        yield f"ranks_per_node = {machine.ranks_per_node}: must be at least 1"
    if not 0 <= machine.cores < inf:
        yield f"cores = {machine.cores}: must be at least 0 (0: each rank has a GPU)"
    if machine.max_fused_head_dim < 0:
        yield (
            f"max_fused_head_dim = {machine.max_fused_head_dim}: must be at least 0 (0: no fused "
            "attention)"
        )
    if not _sound(machine.memory_gb):
        yield f"memory_gb = {machine.memory_gb}: must be positive"
    rates = {
        "memory_bandwidth": machine.memory_bandwidth,
        "host_bandwidth": machine.host_bandwidth,
        **{f"kernels.{name}": rate for name, rate in machine.kernels.items()},
        **{f"gemm.{dtype}.peak": rates.peak for dtype, rates in machine.gemm.items()},
    }
    for key, rate in rates.items():
        if not _SLOWEST <= rate < inf:
            yield f"{key} = {rate}: must be at least {_SLOWEST:g} per second"
    for key in ("launch_s", "wakeup_s", "dispatch_s", "host_s"):
        if not 0 <= getattr(machine, key) <= _LONGEST:
            value = getattr(machine, key)
            yield f"{key} = {value}: must be from 0 to {_LONGEST:g} seconds"


def _wrong_overlap(machine: Machine) -> Iterator[str]:
    if machine.host_s and machine.cores:
        yield f"host_s = {machine.host_s}: must be 0 if cores > 0, because cores launch no kernels"
    if not 1 <= machine.contention < inf:
        yield f"contention = {machine.contention}: must be at least 1 (1: no contention)"
    elif machine.contention > 1 and machine.cores:
        yield (
            f"contention = {machine.contention}: must be 1 if cores > 0, because cores compute "
            "nothing while they copy the data of collectives"
        )


def _wrong_rates(machine: Machine) -> Iterator[str]:
    if not machine.gemm:
        yield "gemm: missing; add [gemm.float32] or another data type"
    for dtype, rates in machine.gemm.items():
        if dtype not in TYPES:
            yield f"gemm.{dtype}: unknown data type; use one of {', '.join(TYPES)}"
        yield from _wrong_knots(f"gemm.{dtype}", flop=rates.flop, rate=rates.rate)
        if rates.sustained and not _SLOWEST <= rates.sustained < inf:
            yield f"gemm.{dtype}.sustained = {rates.sustained}: must be 0 (no limit) or a rate"
        if _SLOWEST <= rates.peak < max(rates.rate, default=0):
            yield (
                f"gemm.{dtype}.peak = {rates.peak:g}: must be at least the largest rate, "
                f"{max(rates.rate):g}; use the peak rate of the device"
            )


def _wrong_attention(machine: Machine) -> Iterator[str]:
    for index, table in enumerate(machine.attention):
        key = f"attention.{index}"
        if table.head_dim < 1:
            yield f"{key}.head_dim = {table.head_dim}: must be at least 1"
        yield from _wrong_knots(key, sequence=table.sequence, rate=table.rate)


def _wrong_errors(machine: Machine) -> Iterator[str]:
    for index, errors in enumerate(machine.errors):
        if not 0 < errors.low <= errors.high < inf:
            yield (
                f"errors.{index}: low = {errors.low} and high = {errors.high}: low must be "
                "positive and at most high"
            )


def _wrong_protocols(machine: Machine) -> Iterator[str]:
    for index, protocol in enumerate(machine.protocols):
        for name, value in asdict(protocol).items():
            if name in ("fraction", "single_member_fraction") and value == 0:
                yield f"protocols.{index}.{name} = 0: must be positive"
            elif name != "name" and not 0 <= value < inf:
                yield f"protocols.{index}.{name} = {value}: must be at least 0"


def _wrong_links(machine: Machine) -> Iterator[str]:
    if not machine.links:
        yield "links: missing; add [[links]] with ranks = 0, which connects all ranks"
    for place, link in enumerate(machine.links):
        yield from _wrong_link(f"links.{place}", link, last=link is machine.links[-1])
    if machine.links and machine.links[0].oversubscription > 1:
        yield (
            f"links.0.oversubscription = {machine.links[0].oversubscription}: must be 1, because "
            "the first link has no uplinks; set it for an outer link"
        )
    for place, (inner, outer) in enumerate(pairwise(machine.links[:-1]), 1):
        if outer.ranks <= inner.ranks or inner.ranks < 1 or outer.ranks % inner.ranks:
            yield (
                f"links.{place}.ranks = {outer.ranks}: must be a multiple of, and larger than, "
                f"ranks = {inner.ranks} of the previous link; sort the links by size"
            )


def _wrong_link(key: str, link: Link, last: bool) -> Iterator[str]:
    if last and link.ranks:
        yield f"{key}.ranks = {link.ranks}: must be 0, because the last link connects all ranks"
    if not last and link.ranks < 2:
        yield f"{key}.ranks = {link.ranks}: must be at least 2 (only the last link may have 0)"
    if not _SLOWEST <= link.bandwidth < inf:
        yield f"{key}.bandwidth = {link.bandwidth}: must be at least {_SLOWEST:g} bytes/s"
    if not 0 <= link.alpha_s <= _LONGEST:
        yield f"{key}.alpha_s = {link.alpha_s}: must be from 0 to {_LONGEST:g} seconds"
    for name in ("node_bandwidth", "pair_bandwidth"):
        if not 0 <= getattr(link, name) < inf:
            yield f"{key}.{name} = {getattr(link, name)}: must be at least 0"
    if not 1 <= link.oversubscription < inf:
        yield f"{key}.oversubscription = {link.oversubscription}: must be at least 1 (1: none)"


def _wrong_tables(machine: Machine) -> Iterator[str]:
    """Yield an error for each unknown, invalid or duplicate table of measured calls."""
    for index, table in enumerate(machine.measured):
        key = f"measured.{index}"
        if table.op not in ALGORITHMS:
            yield f"{key}.op = {table.op!r}: unknown; use one of {', '.join(ALGORITHMS)}"
        if table.members < 2:
            yield f"{key}.members = {table.members}: must be at least 2"
        if table.stride < 0:
            yield f"{key}.stride = {table.stride}: must be at least 0 (0: any stride)"
        yield from _wrong_knots(key, least=2, bytes=table.bytes, seconds=table.seconds)
    calls = [(each.op, each.members, each.stride, each.groups) for each in machine.measured]
    for (op, members, stride, groups), times in Counter(calls).items():
        if times > 1:
            yield (
                f"measured: op = {op!r}, members = {members}, stride = {stride} and groups = "
                f"{groups!r} appear {times} times; keep one table"
            )


def _wrong_knots(key: str, least: int = 1, **columns: Sequence[float]) -> Iterator[str]:
    """Yield an error if two columns of numbers do not define a valid curve.

    Both columns must contain the same number of positive values, at least `least`. The first
    column must be in ascending order.
    """
    (first, x), (second, y) = columns.items()
    if len(x) != len(y) or len(x) < least:
        yield (
            f"{key}: {first} has {counted(len(x), 'value')} and {second} has {len(y)}; both must "
            f"have the same number of values, at least {least}"
        )
    elif not all(map(_sound, (*x, *y))):
        yield f"{key}: {first} and {second} must be positive numbers"
    elif any(here >= there for here, there in pairwise(x)):
        yield f"{key}.{first}: must be in ascending order; sort the values and remove duplicates"


def _sound(value: float) -> bool:
    return 0 < value < inf
