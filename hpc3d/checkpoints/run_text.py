"""Record the paths of a run's data files, and check that a resumed run reads the same data.

A checkpoint manifest stores {path, from_run, tokens, sha256} for each data file. `from_run` is the
path relative to the run folder, so that the file is still found after the project has moved. The
files of a list have the keys data.path[0], data.path[1] and so on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.config.input_file import Config
from hpc3d.config.package_data import text_path
from hpc3d.console.sanitize import counted
from hpc3d.data.batches import USED
from hpc3d.data.mixture import by_key, open_texts
from hpc3d.data.tokenizer import ByteTokenizer, kind_of
from hpc3d.data.validation import VALIDATION, separate_texts

if TYPE_CHECKING:
    from hpc3d.data.token_file import Tokens

PATH = "data.path"
_Texts = Mapping[str, Mapping[str, Any]]


def _paths(config: Config) -> dict[str, str]:
    """Return the path of each data file, by its key."""
    data = config.data
    return by_key(PATH, data.paths()) | by_key(VALIDATION, data.validation_texts())


def named_text(config: Config) -> str:
    """Return "data.path = VALUE" for messages, with a note if this is the default text."""
    paths, default = config.data.paths(), text_path(Config().data.path)
    same = [os.path.realpath(text_path(path)) for path in paths] == [os.path.realpath(default)]
    return f"{PATH} = {', '.join(paths)}" + " (the default text, shipped with hpc3d)" * same


def described(tokens: Tokens, separate: Sequence[Tokens] = ()) -> dict[str, dict[str, Any]]:
    """Return the length and SHA-256 hash of the training texts and separate validation texts."""
    texts = by_key(PATH, tokens.parts()) | by_key(VALIDATION, separate)
    return {key: {"tokens": len(each), "sha256": each.sha256} for key, each in texts.items()}


def recorded(texts: _Texts, config: Config, run: Path) -> dict[str, dict[str, Any]]:
    """Add file paths to the data file descriptions `texts`, for the checkpoint manifest."""
    paths = _paths(config)
    return {
        key: {**text, "path": paths[key], "from_run": os.path.relpath(paths[key], run)}
        for key, text in texts.items()
    }


def located(config: Config, run: Path | None = None, texts: _Texts | None = None) -> Config:
    """Return `config` with absolute data paths, which are valid in any working directory.

    If a path is recorded in `texts` but no longer exists, the file is looked up by its path
    relative to the run folder `run`. The path of a file that is not found is left unchanged.
    """

    def found(key: str, path: str) -> str:
        text = (texts or {}).get(key, {})
        if run and text.get("path") == path and not os.path.exists(path):
            path = os.path.normpath(run / text["from_run"])
            path = path if os.path.exists(path) else text["path"]
        return os.path.abspath(path) if os.path.exists(path) else path

    def all_found(key: str, paths: Sequence[str]) -> Any:
        there = tuple(found(*each) for each in by_key(key, paths).items())
        return there if len(there) > 1 else there[0]

    data = replace(config.data, path=all_found(PATH, config.data.paths()))
    if separate := data.validation_texts():
        data = replace(data, validation=all_found(VALIDATION, separate))
    return replace(config, data=data)


def open_training_text(config: Config) -> Tokens:
    """Open the training text; raise ValueError if it or a validation text cannot be used."""
    data = config.data
    with ExitStack() as opened:
        paths = [*map(text_path, data.paths())]
        tokens = opened.enter_context(open_texts(paths, data.ratio()))
        for text in separate_texts([*map(text_path, data.validation_texts())], tokens):
            text.close()
        opened.pop_all()
    return tokens


def differences(before: _Texts, now: _Texts, config: Config) -> Iterator[str]:
    """Yield a line for each data file of a resumed run that has changed since the checkpoint.

    Raises
    ------
    ValueError
        If the training text has changed and a fraction of it is held out for validation: training
        may already have used the new validation text.
    """
    if any(key.startswith(f"{PATH}[") for key in (*before, *now)):
        yield from _mixed_otherwise(before, now, config)
    elif PATH in before and PATH in now and before[PATH]["sha256"] != now[PATH]["sha256"]:
        line = _changed(PATH, before, now, config)
        if isinstance(share := config.data.validation, float):
            raise ValueError(
                f"{line}, of which data.validation = {share} is held out; restore "
                f"{before[PATH]['path']}, or start a new run"
            )
        yield f"{line}; training continues on the new text"
        if key := _keys_by_hash(VALIDATION, now).get(before[PATH]["sha256"]):
            yield (
                f"{key}: {_paths(config)[key]} was the training text until now, so its loss does "
                "not measure generalization; use another text"
            )
    yield from _validated_otherwise(before, now, config)


def _changed(key: str, before: _Texts, now: _Texts, config: Config) -> str:
    sizes = [counted(each[key]["tokens"], "token") for each in (now, before)]
    return (
        f"{key}: {_paths(config)[key]} differs from the text recorded in the checkpoint "
        f"({sizes[0]} now, {sizes[1]} then)"
    )


def _keys_by_hash(name: str, texts: _Texts) -> dict[str, str]:
    """Return the keys of the training texts (`name` is PATH) or validation texts, by hash."""
    return {text["sha256"]: key for key, text in texts.items() if key.startswith(name)}


def _validated_otherwise(before: _Texts, now: _Texts, config: Config) -> Iterator[str]:
    """Yield a line for each validation text that has changed, is new, or has been removed."""
    earlier, current = (_keys_by_hash(VALIDATION, texts) for texts in (before, now))
    if not earlier or not current:
        return
    for key in (key for digest, key in current.items() if digest not in earlier):
        line = f"{key}: {_paths(config)[key]} is new"
        line = _changed(key, before, now, config) if key in before else line
        yield f"{line}; the best evaluation loss is reset"
    for key in (key for digest, key in earlier.items() if digest not in current):
        if key not in now:
            yield (
                f"{VALIDATION}: {before[key]['path']} is no longer evaluated; the best evaluation "
                "loss is reset"
            )


def _mixed_otherwise(before: _Texts, now: _Texts, config: Config) -> Iterator[str]:
    """Yield a line for each file that has been added to or removed from a mixture.

    If a fraction is held out, yield another line if the list of files or its order has changed.
    """
    share = config.data.validation
    earlier, current = (_keys_by_hash(PATH, texts) for texts in (before, now))
    added = [key for digest, key in current.items() if digest not in earlier]
    removed = [before[key]["path"] for digest, key in earlier.items() if digest not in current]
    if added and removed and isinstance(share, float):
        raise ValueError(
            f"{added[0]}: {_paths(config)[added[0]]} was not part of the mixture so far, of which "
            f"data.validation = {share} is held out; restore {removed[0]}, or start a new run"
        )
    for key in added if earlier else ():
        yield f"{key}: {_paths(config)[key]} is new; training reads it from its first epoch"
    for path in removed:
        yield f"{PATH}: training continues without {path}"
    if isinstance(share, float) and earlier and [*earlier] != [*current]:
        yield (
            f"{VALIDATION} = {share}: the list in {PATH} has changed, and so has the text that is "
            "held out; the best evaluation loss is reset"
        )


def used_by_text(header: Mapping[str, Any]) -> dict[str, int]:
    """Return the position in a checkpoint manifest, with the number of sequences of each text."""
    position = header.get("position") or {}
    if single := (header.get("texts") or {}).get(PATH):
        return {USED + single["sha256"]: position["sequences"], **position}
    return position


def tokenized_by(tokens: Tokens) -> Iterator[str]:
    """Yield a log line with the type of a tokenizer that is read from a file."""
    if tokens.tokenizer != ByteTokenizer.name:
        kind = kind_of(tokens.tokenizer, tokens.json)
        yield f"tokenizer: {kind}, {counted(tokens.vocabulary, 'token')}"


def trained_on(tokens: Tokens, separate: Sequence[Tokens], config: Config) -> Iterator[str]:
    """Yield a warning for each validation text with documents that are in the training text."""
    for key, text in by_key(VALIDATION, separate).items():
        if text.digests & tokens.digests:
            whole = "" if text.sha256 == tokens.sha256 else "partly "
            yield (
                f"{key}: {_paths(config)[key]} is {whole}the training text, so its loss does not "
                "measure generalization; use another text"
            )
