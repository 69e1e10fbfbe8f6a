"""Every key of an input file with its default, its choices and its meaning: for `train --help`;
as the page docs/configuration.md: python -m hpc3d.config.reference > docs/configuration.md; and as
a JSON schema for editors, inputs/hpc3d.schema.json, with --json-schema.

Keys and meanings are those of input_file.py, whose source is read for the texts below the keys.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from inspect import getsource
from itertools import pairwise
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hpc3d.config.input_file import Config
from hpc3d.config.load import known_keys, literal
from hpc3d.limits import SIZES
from hpc3d.pipeline.schedule import SCHEDULES

_COLUMN, _WIDTH = 28, 99
_HEAD = """\
# Configuration

An input file is TOML: a few keys, then the sections below. All of them have defaults, and any is
an option on the command line: `--parallel.scheme 1d`, `--mesh.x 4`. The resolved configuration
is in the run's folder, its trace and its checkpoints. Wrong input is one line each, with the key
and what to do, before anything starts; [limits.md](limits.md) has the bounds. `python -m
hpc3d.train --help` prints the same keys, `--help train.decay` one of them. An editor that knows
JSON schemas completes and checks a file whose first line is `#:schema hpc3d.schema.json` beside
that file of `inputs/`. Keys with a new name are still read by their old one, with a warning
(`hpc3d/renamed.py` lists them). This page is written by `python -m hpc3d.config.reference >
docs/configuration.md`, and a test compares the two; the schema is written with `--json-schema`.
"""


def manual(table: type = Config) -> str:
    """An input file with the defaults of a table; keys that are absent by default are comments."""
    types, texts = get_type_hints(table), meanings(table)
    sections = [key for key in types if is_dataclass(types[key])]
    lines = [
        line
        for item in fields(table)
        if item.name not in sections
        for line in _entry(item.name, item.default, types[item.name], texts[item.name])
    ]
    for key in sections:
        lines += ["", *_with_comment(f"[{key}]", types[key].__doc__), manual(types[key])]
    return "\n".join(lines)


def about(name: str) -> str:
    """A section of the manual, or a key, as train.steps; ValueError for another word."""
    if name not in known_keys():
        near = get_close_matches(name, known_keys(), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(asdict(Config()))}"
        raise ValueError(f"--help {name}: no such key or section; {hint}")
    section, dot, key = name.partition(".")
    table = get_type_hints(Config)[section] if is_dataclass(getattr(Config(), section)) else Config
    if table is not Config and not dot:
        return "\n".join([*_with_comment(f"[{name}]", table.__doc__), manual(table)])
    key = key or name
    value, kind = getattr(table(), key), get_type_hints(table)[key]
    return "\n".join(_entry(name, value, kind, meanings(table)[key]))


def page() -> str:
    """The text of docs/configuration.md."""
    sections = {key: kind for key, kind in get_type_hints(Config).items() if is_dataclass(kind)}
    parts = [_HEAD, *_rows(Config, skip=sections)]
    for key, kind in sections.items():
        parts += [f"\n## [{key}]\n\n{kind.__doc__}\n", *_rows(kind)]
    return "\n".join(parts) + "\n"


def _rows(table: type, skip: Collection[str] = ()) -> Iterator[str]:
    """The lines of a Markdown table with one row per key of a dataclass."""
    types, texts = get_type_hints(table), meanings(table)
    yield from ("| key | default | meaning |", "|---|---|---|")
    for item in fields(table):
        if item.name not in skip:
            default = "absent" if item.default is None else f"`{literal(item.default)}`"
            meaning, kind = texts[item.name], types[item.name]
            if choices := choices_of(kind):
                meaning = f"{', '.join(f'`{choice}`' for choice in choices)}: {meaning}"
            yield f"| `{item.name}` | {default} | {meaning} |"


def _entry(key: str, value: Any, kind: Any, meaning: str) -> list[str]:
    """The lines of a key: with its default, and beside it the choices and what it means."""
    if value is None:
        return _with_comment(f"# {key} =", meaning)
    choices = " | ".join(choices_of(kind))
    return _with_comment(
        f"{key} = {literal(value)}", f"{choices}; {meaning}" if choices else meaning
    )


def choices_of(kind: Any) -> list[str]:
    """The values of a type that has but a few, or of the part of a union that does."""
    if get_origin(kind) is Literal:
        return [literal(each) for each in get_args(kind)]
    return [choice for part in get_args(kind) for choice in choices_of(part)]


def _with_comment(words: Sequence[str], text: str) -> list[str]:
    """The lines of `text` as comments to the right of `words`."""
    first, *more = wrap(text, _WIDTH - _COLUMN - 2)
    return [f"{words:{_COLUMN}}# {first}", *(" " * _COLUMN + f"# {line}" for line in more)]


def meanings(table: type) -> dict[str, str]:
    """{key: the text below it} of a dataclass."""
    (tree,) = ast.parse(getsource(table)).body
    known = "{schedules}", ", ".join(SCHEDULES)
    return {
        key.target.id: " ".join(ast.literal_eval(text.value).split()).replace(*known)
        for key, text in pairwise(tree.body)
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def schema() -> dict[str, Any]:
    """The JSON schema of an input file, which has the meaning of every key and its bounds."""
    from pydantic import TypeAdapter

    found = TypeAdapter(Config).json_schema()
    sections = {key: kind for key, kind in get_type_hints(Config).items() if is_dataclass(kind)}
    tables = {"": (Config, found)}
    tables |= {f"{key}.": (kind, found["$defs"][kind.__name__]) for key, kind in sections.items()}
    for prefix, (kind, table) in tables.items():
        del table["title"]
        for key, text in meanings(kind).items():
            entry = table["properties"][key]
            entry.pop("title", None)
            entry["description"] = text
            if bounds := SIZES.get(prefix + key):
                number = entry.get("anyOf", [entry])[0]
                number["minimum"], number["maximum"] = bounds
    title = "An input file of hpc3d"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **found}


if __name__ == "__main__":
    if sys.argv[1:] == ["--json-schema"]:
        print(json.dumps(schema(), indent=1))
    else:
        print(page(), end="")
