"""Every key of an input file with its default, its choices and its meaning.

Keys and meanings are those of hpc3d.config, whose source is read for the texts below the keys.
"""

import ast
from dataclasses import fields, is_dataclass
from inspect import getsource
from itertools import pairwise
from textwrap import wrap
from typing import get_args, get_type_hints

from hpc3d.config import Config
from hpc3d.inputs import literal

COLUMN, WIDTH = 28, 99


def manual(table=Config):
    """An input file with the defaults of a table; keys that are absent by default are comments."""
    types, texts = get_type_hints(table), meanings(table)
    sections = [key for key in types if is_dataclass(types[key])]
    lines = [
        line
        for item in fields(table)
        if item.name not in sections
        for line in entry(item.name, item.default, types[item.name], texts[item.name])
    ]
    for key in sections:
        lines += ["", *beside(f"[{key}]", types[key].__doc__), manual(types[key])]
    return "\n".join(lines)


def entry(key, value, kind, meaning):
    """The lines of a key: with its default, and beside it the choices and what it means."""
    if value is None:
        return beside(f"# {key} =", meaning)
    choices = " | ".join(map(literal, get_args(kind)))
    return beside(f"{key} = {literal(value)}", f"{choices}; {meaning}" if choices else meaning)


def beside(words, text):
    """The lines of `text` as comments to the right of `words`."""
    first, *more = wrap(text, WIDTH - COLUMN - 2)
    return [f"{words:{COLUMN}}# {first}", *(" " * COLUMN + f"# {line}" for line in more)]


def meanings(table):
    """{key: the text below it} of a dataclass."""
    (tree,) = ast.parse(getsource(table)).body
    return {
        key.target.id: " ".join(ast.literal_eval(text.value).split())
        for key, text in pairwise(tree.body)
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
