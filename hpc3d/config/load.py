"""Read, validate and write input files, including command-line overrides.

Only the rank that reads an input file imports pydantic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from hpc3d.config import deprecated_keys
from hpc3d.config.familiar_names import familiar
from hpc3d.config.input_file import Config
from hpc3d.config.package_data import INPUT, find, refuse_model
from hpc3d.config.wrong_values import mark_wrong
from hpc3d.console import small_files
from hpc3d.console.sanitize import Problems, abbreviated, as_written, sanitized

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_PATHS = "run.out", "data.path", "data.validation", "data.tokenizer"
# Last key that every version of hpc3d writes to config.toml; a file without it is truncated.
_LAST = "run", "watchdog_s"
_OF_MACHINES = {"gemm", "like", "links"}  # keys that distinguish machine files from input files
# Components of pydantic error locations that name a type in a union, not a key of the input file.
_KINDS = re.compile(r"float|str|(literal|tuple)\[.*")


_Rules = Callable[[Config], Iterable[str]]


def load(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    of_run: bool = False,
    rules: _Rules = lambda config: (),
) -> Config:
    """Read and validate an input file, with command-line options that override its keys.

    Parameters
    ----------
    path
        Path of an input file, or name of an input shipped with hpc3d; `None` for all defaults.
    overrides
        Command-line options, such as ["--mesh.x", "4"].
    of_run
        True for the stored configuration of a run. Its deprecated keys cause no warning.
    rules
        Additional rules, as in `validate`.

    Returns
    -------
    Config
        The configuration, with one attribute per table of the file (`config.mesh.x`).

    Raises
    ------
    ValueError
        If the input is invalid or a stored file is incomplete, with one line (key, fix) per error.
    """
    tree = {} if path is None else _read_input(find(path, INPUT))
    notices = deprecated_keys.use_new_names(tree)
    if not of_run:
        _expand_paths(tree)
    elif path and not _has_key(tree, *_LAST):
        raise ValueError(
            f"{path}: empty or truncated, {'.'.join(_LAST)} is missing; restore it, for example "
            "from the input file of the run"
        )
    typed = override(tree, overrides)
    deprecated_keys.warn(typed if of_run else [*notices, *typed])
    return validate(_with_lists(tree), rules)


def _read_input(path: Path | str) -> dict[str, Any]:
    tree = read(path)
    if _OF_MACHINES & {*tree}:
        raise ValueError(f"{path}: a machine file, not an input file; use it with --machine")
    return tree


def _has_key(tree: Mapping[str, Any], section: str, key: str) -> bool:
    return isinstance(table := tree.get(section), dict) and key in table


def _with_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """Convert each single name to a list, in place, if its key has a list of such names."""
    for section, table in tree.items():
        if isinstance(table, dict) and _is_section(section):
            for key, value in table.items():
                if isinstance(value, str) and value in _listed_names(section, key):
                    table[key] = [value]
    return tree


def _listed_names(section: str, key: str) -> Iterator[str]:
    """Yield the names in the lists that the type of a key allows."""
    return chain.from_iterable(map(get_args, _item_types(section, key)))


def _item_types(section: str, key: str) -> Iterator[Any]:
    """Yield the type of the items of each list that the type of a key allows."""
    kind = get_type_hints(type(getattr(Config(), section))).get(key)
    return (get_args(each)[0] for each in (kind, *get_args(kind)) if get_origin(each) is tuple)


def _expand_paths(tree: dict[str, Any]) -> None:
    """Expand `~` and `$NAME` in all paths of a parsed input file, in place."""
    for key in _PATHS:
        section, name = key.split(".")
        table = tree.get(section)
        if isinstance(table, dict) and name in table:
            table[name] = _with_expanded_paths(key, table[name])


def _with_expanded_paths(key: str, value: Any) -> Any:
    """Expand the path `value`, or all paths in the list `value`; return other values unchanged."""
    if isinstance(value, list):
        return [_with_expanded_paths(key, each) for each in value]
    return _expanded(key, value) if isinstance(value, str) else value


def _expanded(key: str, text: str) -> str:
    """Expand `~` and `$NAME` in a path; raise ValueError if a user or variable is unknown."""
    for name in re.findall(r"\$(\w+|\{[^}]*\})", text):
        if name.strip("{}") not in os.environ:
            variable = name.strip("{}")
            raise ValueError(f"{key} = {text:.200}: set the environment variable {variable}")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"{key} = {text:.200}: unknown user; write the full path")
    return os.path.expandvars(path)


def read(path: Path | str) -> dict[str, Any]:
    if Path(path).suffix == ".py":
        raise ValueError(
            f"{path}: input files are written in TOML, not in Python; docs/data.md explains which "
            "keys correspond to the settings of a nanoGPT configuration"
        )
    refuse_model(path)
    content = small_files.read(path, remedy="specify a readable file")
    try:
        return small_files.toml(content.decode())
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None


def override(tree: dict[str, Any], words: Sequence[str]) -> list[str]:
    """Apply command-line options `--section.key value` to a parsed input file, in place.

    The form `--section.key=value` is equivalent. Returns a notice for each deprecated name.
    """
    pairs = [*options(words)]
    keys, notices = deprecated_keys.rename_options([option[2:] for option, _ in pairs])
    for (option, text), name in zip(pairs, keys, strict=True):
        if option.count(".") > 2:  # at most two dots, as in --parallel.split.m
            raise ValueError(f"{option:.60}: unknown key; write --section.key VALUE")
        *sections, key = name.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ValueError(f"{option}: {section} is a key, not a section; remove {option}")
        value = option_value(text)
        if name in _PATHS and isinstance(value, str) and re.fullmatch(r"\[.*\]", value):
            raise ValueError(f"{option} {abbreviated(value)}: not a list; {_quoted(name)}")
        table[key] = _with_expanded_paths(name, value) if name in _PATHS else value
    return notices + deprecated_keys.use_new_names(tree)


def option_value(text: str) -> Any:
    """Convert the value of a command-line option from TOML; other text is a string."""
    try:
        return small_files.toml(f"value = {text}")["value"]
    except ValueError:
        return text


def options(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each command-line option and its value as a pair of strings."""
    words = iter(words)
    for word in words:
        if not word.startswith("--"):
            raise ValueError(
                f"{word}: unexpected argument; write INPUT.toml --section.key VALUE ..."
            )
        option, equals, text = word.partition("=")
        if not equals:
            text = next(words, "--")
            if text.startswith("--"):
                key = option[2:]
                if "." not in key and key not in known_keys():
                    raise ValueError(f"{option}: unknown option; {hint(key)}")
                raise ValueError(f"{option}: the value is missing; write {option} VALUE")
        if any("\ud800" <= letter <= "\udfff" for letter in option + text):
            raise ValueError(f"{option} {text}: not valid UTF-8; use another value")
        yield option, text


def stored(text: str) -> Config:
    """Parse the configuration stored in a checkpoint or a trace.

    Raises ValueError if the text is not a valid configuration or a number is out of bounds.
    """
    from hpc3d.config.constraints import out_of_bounds
    from hpc3d.config.size_rules import too_large

    tree = small_files.toml(text)
    deprecated_keys.use_new_names(tree)
    config = validate(tree)
    for line in chain(out_of_bounds(config), too_large(config)):
        raise ValueError(line)
    return config


def validate(tree: dict[str, Any], rules: _Rules = lambda config: ()) -> Config:
    """Convert a parsed input file to a `Config`.

    Raises `Problems`, which lists all unknown keys, all values of a wrong type, and the errors
    that `rules` report for the remaining values.
    """
    import json

    from pydantic import ValidationError

    # Strict mode rejects `true` as a number. In this mode, pydantic converts dicts to dataclasses
    # only if the input is JSON.
    text = json.dumps(tree, default=str)
    try:
        return _adapter().validate_json(text, strict=True)
    except ValidationError as errors:
        by_key: dict[str, list[Any]] = {}
        for error in errors.errors():
            where = map(str, error["loc"])
            key = ".".join(part for part in where if not _KINDS.fullmatch(part))
            by_key.setdefault(re.sub(r"\.\d+$", "", key), []).append(error)
        lines = [*chain.from_iterable(starmap(_explain, by_key.items()))]
        wrong = [error["loc"] for error in errors.errors()]
        if all(wrong):  # an empty location means that the JSON was nested too deeply
            lines += rules(_of_valid_keys(tree, wrong, lines))
        raise Problems(lines) from None


def _of_valid_keys(
    tree: dict[str, Any], wrong: Iterable[Sequence[Any]], lines: list[str]
) -> Config:
    """Build a Config from `tree`, with the placeholder WRONG for each key in `wrong`.

    An unset key that the error messages `lines` mention is also set to WRONG, because the user may
    have misspelled this key. So are all keys of [mesh] if one of them is wrong, because the number
    of ranks depends on all of them.
    """
    words = {*re.findall(r"\w+(?:\.\w+)?", " ".join(lines))}
    tables = {name: table for name, table in tree.items() if isinstance(table, dict)}
    given = {*tree, *(f"{name}.{key}" for name, table in tables.items() for key in table)}
    meant = [
        key for key in flat(Config()) if {key, key.split(".")[0]} & words and key not in given
    ]
    for section, *keys in wrong:
        if keys:
            tree[section].pop(keys[0], None)
        else:
            tree.pop(section)
    if any(section == "mesh" for section, *_ in wrong):
        meant.append("mesh")
    return mark_wrong(validate(tree), [*lines, *meant])


@cache
def _adapter() -> TypeAdapter[Config]:
    """Return the pydantic adapter of `Config`.

    The adapter takes milliseconds to build and is cached, because `plan` validates many
    configurations.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def _explain(key: str, errors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one message that combines the pydantic errors for a key, one per allowed type.

    For an unknown table, also yield a message for each of its keys that another program uses.
    """
    first = errors[0]
    if first["type"] == "unexpected_keyword_argument":
        yield f"{key}: unknown key; {hint(key, table=isinstance(first['input'], dict))}"
        yield from _foreign(key, first["input"])
        return
    found = abbreviated(as_written(first["input"]))
    names = [*_listed_names(*first["loc"][:2])] if "." in key else []
    if items := [error for error in errors if isinstance(error["loc"][-1], int)]:
        errors = _of_one_item(items)
        if not errors:
            yield f"{key}: list either indices or names, not both; the names are {_any_of(names)}"
            return
        found = abbreviated(as_written(errors[0]["input"]))
        key = f"{key}[{errors[0]['loc'][-1]}]"
    of_names = f"list of {_any_of(names)}" if names else "list"
    said = [error["msg"].replace("valid array", of_names) for error in errors]
    if first["type"] == "dataclass_type":
        yield f"{key}: must be a table, not {found}; write its keys below a line [{key}]"
        return
    reasons = [*dict.fromkeys(each[0].lower() + each[1:] for each in said)]
    also = dict.fromkeys(reason.removeprefix("input should be ") for reason in reasons[1:])
    remedy = "correct the value"
    if "list" in reasons[-1] and str(first["input"]).startswith("["):
        remedy = _quoted(key)
    elif "list" in reasons[0]:
        remedy = f"write a list, as in {_list_option(key)}"
    yield f"{key}: {' or '.join([reasons[0], *also])}, not {found}; {remedy}"


def _of_one_item(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the pydantic errors of the first list item that is wrong for every allowed type.

    The result is empty if each item is valid for one of several types of lists.
    """
    kinds = {error["loc"][-2] for error in errors}
    by_item: dict[int, list[Mapping[str, Any]]] = {}
    for error in errors:
        by_item.setdefault(error["loc"][-1], []).append(error)
    wrong = [index for index, each in by_item.items() if len(each) == len(kinds)]
    return by_item[min(wrong)] if wrong else []


def _any_of(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def _quoted(key: str) -> str:
    """Return advice on a list from a shell, which removes the double quotes of its strings."""
    return f"in a shell, put the list in single quotes: {_list_option(key)}"


def _list_option(key: str) -> str:
    """Return an example of an option that sets a key to a list of the type of the key."""
    *_, item = str, *_item_types(*key.split(".")[:2])
    example = get_args(item)[:1] or (("one", "two") if item is str else (1, 1))
    return f"--{key} '{literal(example)}'"


def _foreign(key: str, value: Any) -> Iterator[str]:
    """Yield advice on each key in an unknown table for which hpc3d has an equivalent key."""
    for name, part in value.items() if isinstance(value, dict) else ():
        if said := familiar(name):
            yield f"{key}.{name}: unknown key; {said}"
        yield from _foreign(f"{key}.{name}", part)


def hint(key: str, table: bool = False, more: Sequence[str] = ()) -> str:
    """Return a hint for an unknown key: the most similar valid name, or all valid names.

    `more` contains additional valid names.
    """
    *sections, name = key.split(".")
    if said := familiar(name):
        return said
    known = [*known_keys(), *more]
    here = [each for each in known if each.split(".")[:-1] == sections]
    tables = [each for each in here if _is_section(each)] if table and not sections else []
    for keys in [tables] if tables else [here, known]:
        names = {key.split(".")[-1]: key for key in keys}
        if near := get_close_matches(name, names, 1):
            return f"did you mean {names[near[0]]}?"
    names = (each.rpartition(".")[2] for each in tables or here or asdict(Config()))
    return f"use one of {', '.join(names)}"


def known_keys() -> list[str]:
    """Return the names of all sections of an input file, and of all keys as section.key."""
    return [*asdict(Config()), *(key for key in flat(Config()) if "." in key)]


def flat(config: Config) -> dict[str, Any]:
    """Return a configuration as a flat dict from section.key to value."""
    tree = asdict(config)
    tables = {key: tree.pop(key) for key in [*tree] if _is_section(key)}
    nested = {f"{key}.{name}": v for key, names in tables.items() for name, v in names.items()}
    return {**tree, **nested}


def _is_section(key: str) -> bool:
    return is_dataclass(getattr(Config(), key, None))


def to_toml(config: Config) -> str:
    """Format a configuration as a TOML input file."""
    top, tables = [], []
    for key, value in asdict(config).items():
        if isinstance(value, dict):
            lines = [f"{name} = {literal(v)}" for name, v in value.items() if v is not None]
            tables.append("\n".join([f"[{key}]", *lines]))
        else:
            top.append(f"{key} = {literal(value)}")
    return "\n\n".join(["\n".join(top), *tables]) + "\n"


def literal(value: Any) -> str:
    """Format a value as TOML."""
    import json

    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {literal(v)}" for key, v in value.items()) + " }"
    return sanitized(json.dumps(value, ensure_ascii=False, default=str))
