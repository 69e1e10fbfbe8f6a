"""Reference of all keys of an input file, with their defaults, choices and descriptions.

`train --help` prints the reference.  `python -m hpc3d.config.reference > docs/configuration.md`
writes the documentation page.  With `--json-schema`, the module prints a JSON schema for editors,
which is stored as inputs/hpc3d.schema.json.  The description of a key is the string below it in
input_file.py.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import getdoc, getsource
from itertools import pairwise
from math import isfinite
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hpc3d.config.constraints import Bound, constraints_of
from hpc3d.config.input_file import Config
from hpc3d.config.load import hint, known_keys, literal
from hpc3d.pipeline.schedule import SCHEDULES

_SECTIONS = {key: kind for key, kind in get_type_hints(Config).items() if is_dataclass(kind)}
_COLUMN, _NARROWEST, _WIDTH = 28, 60, 99
_HEAD = """\
# Configuration

This reference lists every key of an input file, with its default, its choices and its meaning.

An input file is TOML: top-level keys, then the sections below. Every key has a default and is also
a command-line option, such as `--parallel.scheme 1d` or `--mesh.x 4`. hpc3d stores the resolved
configuration in the run's folder, its trace and its checkpoints. It reports every problem on its
own line, with the key and a fix, before training starts. A rule that depends on an invalid value
is checked once you have corrected the value. [limits.md](limits.md) lists the bounds.
`python -m hpc3d.train` prints the same keys with `--help`, and one key with `--help train.decay`.

To complete and check input files in an editor, start a file with `#:schema hpc3d.schema.json` and
copy that file from `inputs/`. Renamed keys are still read under their old names, with a warning
(`hpc3d/config/deprecated_keys.py`). Paths may begin with `~` and contain `$NAME`.

The command `python -m hpc3d.config.reference > docs/configuration.md` writes this page, and
`--json-schema` writes the schema.
"""


def manual(table: type = Config, width: int = _WIDTH) -> str:
    """Format the keys of a dataclass as an input file, with default values and descriptions.

    Lines are wrapped to `width` characters. Keys that are unset by default are commented out.
    """
    types, texts = get_type_hints(table), meanings(table)
    sections = [key for key in types if is_dataclass(types[key])]
    lines = [
        line
        for item in fields(table)
        if item.name not in sections
        for line in _entry(item.name, item.default, types[item.name], texts[item.name], width)
    ]
    for key in sections:
        head = _with_comment(f"[{key}]", getdoc(types[key]), width)
        lines += ["", *head, manual(types[key], width)]
    return "\n".join(lines)


def about(name: str, width: int = _WIDTH) -> str:
    """Return the help text of a section, or of a key such as train.steps.

    Raises ValueError if the name is unknown.
    """
    if name not in known_keys():
        raise ValueError(f"--help {name}: no such key or section; {hint(name)}")
    section, _, key = name.partition(".")
    table = _SECTIONS.get(section, Config)
    if name in _SECTIONS:
        head = _with_comment(f"[{name}]", getdoc(table), width)
        return "\n".join([*head, manual(table, width)])
    key = key or name
    value, kind = getattr(table(), key), get_type_hints(table)[key]
    return "\n".join(_entry(name, value, kind, meanings(table)[key], width))


def page_width() -> int:
    """Return the width of the terminal in characters, limited to [_NARROWEST, _WIDTH]."""
    return max(_NARROWEST, min(_WIDTH, get_terminal_size((_WIDTH, 0)).columns))


def page() -> str:
    """Return the content of the page docs/configuration.md."""
    parts = [_HEAD, *_rows(Config)]
    for key, kind in _SECTIONS.items():
        parts += [f"\n## [{key}]\n\n{getdoc(kind)}\n", *_rows(kind)]
    return "\n".join(parts) + "\n"


def _rows(table: type) -> Iterator[str]:
    """Yield a Markdown list with one item per key of a dataclass, excluding its sections."""
    types, texts = get_type_hints(table), meanings(table)
    for item in fields(table):
        if item.name not in _SECTIONS:
            given = [] if item.default is None else [f"default `{literal(item.default)}`"]
            if choices := choices_of(types[item.name]):
                given += ["choices " + ", ".join(f"`{choice}`" for choice in choices)]
            facts = f" ({'; '.join(given)})" if given else ""
            text = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", texts[item.name])
            yield f"* **`{item.name}`**{facts}: {text}"


def _entry(key: str, value: Any, kind: Any, meaning: str, width: int) -> list[str]:
    """Format a key as lines: its default, and a comment with its choices and description."""
    choices = " | ".join(choices_of(kind))
    left = f"# {key} =" if value is None else f"{key} = {literal(value)}"
    return _with_comment(left, f"{choices}; {meaning}" if choices else meaning, width)


def choices_of(kind: Any) -> list[str]:
    """Return the allowed values of a Literal type, or of all Literal types in a union."""
    if get_origin(kind) is Literal:
        return [literal(each) for each in get_args(kind)]
    return [choice for part in get_args(kind) for choice in choices_of(part)]


def _with_comment(words: str, text: str, width: int) -> list[str]:
    """Format `words` as the left column and `text` as a wrapped comment in the right column."""
    first, *more = wrap(" ".join(text.split()), width - _COLUMN - 2)
    return [f"{words:{_COLUMN}}# {first}", *(" " * _COLUMN + f"# {line}" for line in more)]


def meanings(table: type) -> dict[str, str]:
    """Return the description of each key, that is, the string below the key in the dataclass."""
    (tree,) = ast.parse(getsource(table)).body
    known = "{schedules}", ", ".join(SCHEDULES)
    return {
        key.target.id: " ".join(ast.literal_eval(text.value).split()).replace(*known)
        for key, text in pairwise(tree.body)
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def schema() -> dict[str, Any]:
    """Return the JSON schema of an input file, with the description and the bounds of each key."""
    from pydantic import TypeAdapter

    found = TypeAdapter(Config).json_schema()
    tables = {"": (Config, found)}
    tables |= {f"{key}.": (kind, found["$defs"][kind.__name__]) for key, kind in _SECTIONS.items()}
    for prefix, (kind, table) in tables.items():
        del table["title"]
        for key, text in meanings(kind).items():
            entry = table["properties"][key]
            entry.pop("title", None)
            entry["description"] = text
            bounds = constraints_of(Config, Bound).get(prefix + key, ())
            finite = [each for each in bounds if isfinite(each.limit)]
            entry.get("anyOf", [entry])[0].update({each.keyword: each.limit for each in finite})
    title = "hpc3d input file"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **found}


if __name__ == "__main__":
    if sys.argv[1:] == ["--json-schema"]:
        print(json.dumps(schema(), indent=1))
    else:
        print(page(), end="")
