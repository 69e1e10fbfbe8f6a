"""Tokenizer of a run, stored as Hugging Face files next to config.toml.

Generation and export therefore do not need the training text, and an imported model keeps its
tokenizer. A byte-level run has no such files; its config.toml names the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc3d.checkpoints.hf_settings import CONFIG, GENERATION, TOKENIZER_FILES
from hpc3d.config.input_file import ModelConfig
from hpc3d.config.load import load
from hpc3d.console import small_files
from hpc3d.data.token_file import Tokens, UntokenizedError
from hpc3d.data.tokenizer import END_NAME, BpeTokenizer, ByteTokenizer, reading, same_rules
from hpc3d.data.tokenizer_files import (
    RULES,
    SETTINGS,
    object_in,
    rules_of_bytes,
    settings_in,
    token_in,
    tokenizer_from,
)
from hpc3d.model.families import least_vocabulary
from hpc3d.training.run_folder import write_text

_SPECIAL = "special_ids.json"  # special token ids from an imported config.json
_SPECIAL_IDS = "bos_token_id", "eos_token_id", "pad_token_id"


def _home_of(path: Path) -> Path:
    """Return the folder with the tokenizer of a run, checkpoint or Hugging Face model."""
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.toml").exists():
        return path.parent.parent
    return path if path.is_dir() else path.parent


def kept_tokenizer(path: Path) -> BpeTokenizer | None:
    """Return the tokenizer stored with a run, checkpoint or Hugging Face model, or `None`."""
    home = _home_of(path)
    return tokenizer_from(str(home)) if (home / RULES).is_file() else None


@contextmanager
def advise_tokenizer(path: Path | None) -> Iterator[None]:
    """Complete the advice to tokenize a text by the tokenizer of the model at `path`, if any."""
    try:
        yield
    except UntokenizedError as error:
        if path is None or _rules_of(home := _home_of(path)) is None:
            raise
        raise UntokenizedError(f"{error} --tokenizer {home}") from error


def keep(folder: Path, tokens: Tokens) -> None:
    """Write the tokenizer of the training data to a run folder, unless it already has one."""
    if tokens.tokenizer != ByteTokenizer.name and not (folder / RULES).exists():
        _write(folder, tokens.json, tokens.end_name)


def _write(folder: Path, rules: str, end_name: str | None) -> None:
    """Write the tokenizer files that `transformers.AutoTokenizer` reads."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["clean_up_tokenization_spaces"] = False
    if end_name:
        settings |= dict.fromkeys(("eos_token", "bos_token", "unk_token"), end_name)
    write_text(folder / RULES, rules)
    write_text(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def refuse_unfit(source: Path, vocabulary: int) -> None:
    """Raise ValueError if a Hugging Face model cannot be used with its tokenizer.

    A tokenizer is rejected if it is invalid, has more tokens than the model's vocabulary, or has
    settings that are not valid JSON.
    """
    home = _home_of(source)
    for name in (SETTINGS, GENERATION):
        object_in(home / name)
    path = home / RULES
    if not path.is_file() or find_spec("tokenizers") is None:
        return
    try:
        known = BpeTokenizer(small_files.read(path, small_files.MOST_JSON).decode()).vocabulary
        if known > vocabulary:
            raise ValueError(f"it has {known} tokens, but model.vocabulary = {vocabulary}")
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; replace it with the model's tokenizer, or remove it"
        ) from error


def take_along(source: Path, run: Path) -> bool:
    """Copy the tokenizer and special token ids of a Hugging Face model to a run folder.

    Returns True if a tokenizer was found.
    """
    home = _home_of(source)
    told = object_in(home / CONFIG)
    if special := {key: told[key] for key in _SPECIAL_IDS if key in told}:
        write_text(run / _SPECIAL, json.dumps(special) + "\n")
    if RULES in [*_copied(home, run)]:
        return True
    try:
        older = tokenizer_from(str(home))  # a GPT-2 tokenizer has vocab.json and merges.txt
    except ValueError:
        return False
    _write(run, older.json, older.end_name)
    return True


def _copied(home: Path, target: Path) -> Iterator[str]:
    """Copy generation_config.json and the tokenizer files, and yield their names.

    Tokenizer files are copied only if tokenizer.json exists.
    """
    for name in (GENERATION, *(TOKENIZER_FILES if (home / RULES).is_file() else ())):
        if (home / name).is_file():
            write_text(
                target / name, small_files.read(home / name, small_files.MOST_JSON).decode()
            )
            yield name


def export(path: Path, target: Path) -> list[str]:
    """Export the tokenizer and the generation_config.json of a run or checkpoint.

    Returns the names of the exported files.
    """
    home = _home_of(path)
    copied = [*_copied(home, target)]
    if RULES in copied or not of_bytes(home):
        return copied
    _write(target, rules_of_bytes(), END_NAME)
    return [*copied, RULES, SETTINGS]


def special_ids(path: Path) -> dict[str, Any]:
    """Return the special token ids for the config.json of an exported model.

    The ids are those of the run's tokenizer. If the run was started from an imported model, the
    ids in that model's config.json take precedence, provided that the tokenizer has tokens with
    these ids.
    """
    home = _home_of(path)
    imported = object_in(home / _SPECIAL)
    if not (tokenizer := kept_tokenizer(home)):
        bytes_ = dict.fromkeys(("bos_token_id", "eos_token_id"), 0) if of_bytes(home) else {}
        return bytes_ | imported
    settings = settings_in(home)
    return {
        f"{key}_id": tokenizer.id_of(token_in(settings, key)) for key in ("bos_token", "eos_token")
    } | {key: ids for key, ids in imported.items() if tokenizer.has(ids)}


def end_ids(path: Path) -> frozenset[int]:
    """Return the end-of-text token ids of a Hugging Face model or of a run started from it."""
    home = _home_of(path)
    found: set[int] = set()
    for name in (CONFIG, _SPECIAL, GENERATION):
        ends = object_in(home / name).get("eos_token_id")
        found |= {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    return frozenset(found)


def of_bytes(run: Path) -> bool:
    """Return True if `run` is the folder of a run with the byte tokenizer."""
    return _name_in(run) == ByteTokenizer.name


def _name_in(run: Path) -> str | None:
    path = run / "config.toml"
    return load(path, [], of_run=True).data.tokenizer if path.exists() else None


def refuse_another(
    path: Path, tokens: Tokens, model: ModelConfig, name: str | None = None
) -> None:
    """Raise ValueError if `tokens` were not produced by the tokenizer of a trained model.

    `path` is a run, a checkpoint or a Hugging Face model, and `model` is its configuration. `name`
    is the name of its tokenizer; the default is the name in config.toml. If the tokenizer of the
    model is unknown, only the vocabulary sizes are compared.
    """
    home = _home_of(path)
    where: object = home / RULES if (home / RULES).is_file() else home
    rules = rules_of_bytes() if tokens.tokenizer == ByteTokenizer.name else tokens.json
    with reading(home / RULES, "not a readable tokenizer", "restore the tokenizer of the run"):
        known = _rules_of(home)
        same = known is not None and same_rules(known, rules)
    if known is None:
        where = name or _name_in(home)
        same = where in (None, tokens.tokenizer)
    if not same:
        raise ValueError(
            f"data.path: the tokenizer of this text ({tokens.described()}) differs from the "
            f"tokenizer of {path}; create a token file with python -m hpc3d.prepare TEXT -o "
            f"tokens.h5 --tokenizer {where}"
        )
    _refuse_vocabulary(path, tokens, model, known=where is not None)


def _refuse_vocabulary(path: Path, tokens: Tokens, model: ModelConfig, known: bool) -> None:
    """Raise ValueError if the vocabulary of the model at `path` does not fit the text.

    `known` is true if the tokenizer of the model is known. Otherwise, a text of bytes is rejected
    unless the model's vocabulary has exactly the size that bytes need.
    """
    least = least_vocabulary(model, tokens.vocabulary, tokens.mask())
    is_bytes = tokens.tokenizer == ByteTokenizer.name
    if is_bytes and not known and model.vocabulary not in (None, least):
        raise ValueError(
            f"data.path: the text is tokenized into bytes, but the tokenizer of {path} is unknown "
            f"and has {model.vocabulary} tokens; create a token file with python -m "
            "hpc3d.prepare TEXT -o tokens.h5 --tokenizer FILE"
        )
    if model.vocabulary and model.vocabulary < least:
        fix = f"use data that were tokenized with the tokenizer of {path}"
        if not known:
            fix = (
                f"{path} has no tokenizer: use a token file that hpc3d.prepare writes with the "
                "tokenizer of the model, or from train.bin of nanoGPT"
            )
        raise ValueError(
            f"data.path: the tokenizer of this text needs a vocabulary of {least} tokens, but "
            f"model.vocabulary = {model.vocabulary}; {fix}"
        )


def _rules_of(home: Path) -> str | None:
    """Return the JSON text of the tokenizer in a folder, or `None` if it has none."""
    if (home / RULES).is_file():
        return small_files.read(home / RULES, small_files.MOST_JSON).decode()
    with suppress(ValueError):
        return tokenizer_from(str(home)).json  # a GPT-2 tokenizer has vocab.json and merges.txt
    return None
