"""Record the paths of a run's data files, and check that a resumed run reads the same data.

A checkpoint manifest stores {path, from_run, tokens, sha256} for each data file. `from_run` is the
path relative to the run folder, so that the file is still found after the project has moved. The
files of a mixture have the keys data.path[0], data.path[1] and so on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.console.sanitize import counted
from hpc3d.data.batches import USED
from hpc3d.data.tokenizer import ByteTokenizer, kind_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.data.token_file import Tokens

PATH, VALIDATION = "data.path", "data.validation"
_Texts = Mapping[str, Mapping[str, Any]]


def _keys(count: int) -> list[str]:
    """Return the keys of the `count` files of the training text."""
    return [PATH] if count == 1 else [f"{PATH}[{number}]" for number in range(count)]


def _paths(config: Config) -> dict[str, str]:
    """Return the path of each data file, by its key."""
    paths = config.data.paths()
    return dict(zip(_keys(len(paths)), paths, strict=True)) | {
        VALIDATION: str(config.data.validation)
    }


def described(tokens: Tokens, held: Tokens | None) -> dict[str, dict[str, Any]]:
    """Return the length and SHA-256 hash of the training text and any validation text."""
    texts = dict(zip(_keys(len(tokens.parts())), tokens.parts(), strict=True))
    texts |= {} if held is None else {VALIDATION: held}
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

    paths = [found(key, path) for key, path in _paths(config).items() if key != VALIDATION]
    data = replace(config.data, path=tuple(paths) if len(paths) > 1 else paths[0])
    if isinstance(data.validation, str) and data.validation:
        data = replace(data, validation=found(VALIDATION, data.validation))
    return replace(config, data=data)


def differences(before: _Texts, now: _Texts, config: Config) -> Iterator[str]:
    """Yield a line for each data file of a resumed run that has changed since the checkpoint.

    Raises
    ------
    ValueError
        If the training text has changed and a fraction of it is held out for validation: training
        may already have used the new validation text.
    """
    keys = [key for key in now if key in before]
    if any(key.startswith(f"{PATH}[") for key in (*before, *now)):
        yield from _mixed_otherwise(before, now, config)
        keys = [key for key in keys if key == VALIDATION]
    for key in keys:
        if before[key]["sha256"] == now[key]["sha256"]:
            continue
        sizes = [counted(each[key]["tokens"], "token") for each in (now, before)]
        path = _paths(config)[key]
        line = (
            f"{key}: {path} differs from the text recorded in the checkpoint ({sizes[0]} now, "
            f"{sizes[1]} then)"
        )
        if key == VALIDATION:
            yield f"{line}; the best evaluation loss is reset"
        elif isinstance(share := config.data.validation, float):
            raise ValueError(
                f"{line}, of which data.validation = {share} is held out; restore "
                f"{before[key]['path']}, or start a new run"
            )
        else:
            yield f"{line}; training continues on the new text"
            if VALIDATION in now and now[VALIDATION]["sha256"] == before[key]["sha256"]:
                yield (
                    f"data.validation: {config.data.validation} was the training text until now, "
                    "so its loss does not measure generalization; use another text"
                )


def _mixed_otherwise(before: _Texts, now: _Texts, config: Config) -> Iterator[str]:
    """Yield a line for each file that has been added to or removed from a mixture."""
    earlier, current = (
        {text["sha256"]: key for key, text in texts.items() if key != VALIDATION}
        for texts in (before, now)
    )
    added = [key for digest, key in current.items() if digest not in earlier]
    removed = [before[key]["path"] for digest, key in earlier.items() if digest not in current]
    if added and removed and isinstance(share := config.data.validation, float):
        raise ValueError(
            f"{added[0]}: {_paths(config)[added[0]]} was not part of the mixture so far, of which "
            f"data.validation = {share} is held out; restore {removed[0]}, or start a new run"
        )
    for key in added if earlier else ():
        yield f"{key}: {_paths(config)[key]} is new; training reads it from its first epoch"
    for path in removed:
        yield f"{PATH}: training continues without {path}"


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


def trained_on(tokens: Tokens, held: Tokens | None, config: Config) -> Iterator[str]:
    """Yield a warning if documents of the validation text are also in the training text."""
    if held is not None and held.digests & tokens.digests:
        whole = "" if held.sha256 == tokens.sha256 else "partly "
        yield (
            f"data.validation: {config.data.validation} is {whole}the training text, so its loss "
            "does not measure generalization; use another text"
        )
