"""The tokenizer of a run, in the files of Hugging Face beside its config.toml: generation and
export need no text, and whoever imports a model takes its tokenizer along.

A run on bytes has no such files: its config.toml says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d import files
from hpc3d.checkpoints.hf_settings import CONFIG, GENERATION, TOKENIZER_FILES
from hpc3d.config.load import load
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
from hpc3d.training.run_folder import write_text

if TYPE_CHECKING:
    from hpc3d.data.token_file import Tokens

_SPECIAL = "special_ids.json"  # in the folder of a run: what was in the config.json of its import
_SPECIAL_IDS = "bos_token_id", "eos_token_id", "pad_token_id"


def _home_of(path: Path) -> Path:
    """The folder that has the tokenizer of a run, a checkpoint of it, or published weights."""
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.toml").is_file():
        return path.parent.parent
    return path if path.is_dir() else path.parent


def kept_tokenizer(path: Path) -> BpeTokenizer | None:
    """That of a run folder, of one of its checkpoints, or of published weights; None without."""
    home = _home_of(path)
    return tokenizer_from(str(home)) if (home / RULES).is_file() else None


def keep(folder: Path, tokens: Tokens) -> None:
    """Write what has made the tokens of a run into its folder, unless that has it."""
    if tokens.tokenizer != ByteTokenizer.name and not (folder / RULES).exists():
        _write(folder, tokens.json, tokens.end_name)


def _write(folder: Path, rules: str, end_name: str | None) -> None:
    """Write a tokenizer as AutoTokenizer of `transformers` reads it."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["clean_up_tokenization_spaces"] = False
    if end_name:
        settings |= dict.fromkeys(("eos_token", "bos_token", "unk_token"), end_name)
    write_text(folder / RULES, rules)
    write_text(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def refuse_unfit(source: Path, vocabulary: int) -> None:
    """Refuse an invalid tokenizer beside published weights, one with more tokens than their model,
    and settings beside it that are no JSON."""
    home = _home_of(source)
    for name in (SETTINGS, GENERATION):
        object_in(home / name)
    path = home / RULES
    if not path.is_file() or find_spec("tokenizers") is None:
        return
    try:
        known = BpeTokenizer(files.read(path, files.MOST_JSON).decode()).vocabulary
        if known > vocabulary:
            raise ValueError(f"it has {known} tokens, and the model {vocabulary}")
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; put the right one there, or take it out of the folder"
        ) from error


def take_along(source: Path, run: Path) -> bool:
    """Copy the tokenizer of published weights to a run of them, and what their files say of
    special tokens; whether there is a tokenizer."""
    home = _home_of(source)
    told = object_in(home / CONFIG)
    if special := {key: told[key] for key in _SPECIAL_IDS if key in told}:
        write_text(run / _SPECIAL, json.dumps(special) + "\n")
    if RULES in [*_copied(home, run)]:
        return True
    try:
        older = tokenizer_from(str(home))  # in GPT-2's two files
    except ValueError:
        return False
    _write(run, older.json, older.end_name)
    return True


def _copied(home: Path, target: Path) -> Iterator[str]:
    """The names of files that were copied: of a tokenizer none without its rules."""
    for name in (GENERATION, *(TOKENIZER_FILES if (home / RULES).is_file() else ())):
        if (home / name).is_file():
            write_text(target / name, files.read(home / name, files.MOST_JSON).decode())
            yield name


def export(path: Path, target: Path) -> list[str]:
    """Write the tokenizer of a run, or of a checkpoint of it, into the folder of its exported
    weights, and the generation_config.json that it was imported with; the names of the files."""
    home = _home_of(path)
    copied = [*_copied(home, target)]
    if RULES in copied or not _of_bytes(home):
        return copied
    _write(target, rules_of_bytes(), END_NAME)
    return [*copied, RULES, SETTINGS]


def special_ids(path: Path) -> dict[str, Any]:
    """What the config.json of an exported model says of special tokens: as it was imported, where
    its tokenizer has them, else by that."""
    home = _home_of(path)
    imported = object_in(home / _SPECIAL)
    if not (tokenizer := kept_tokenizer(home)):
        bytes_ = dict.fromkeys(("bos_token_id", "eos_token_id"), 0) if _of_bytes(home) else {}
        return bytes_ | imported
    settings = settings_in(home)
    return {
        f"{key}_id": tokenizer.id_of(token_in(settings, key)) for key in ("bos_token", "eos_token")
    } | {key: ids for key, ids in imported.items() if tokenizer.has(ids)}


def end_ids(path: Path) -> frozenset[int]:
    """The tokens that end a text, by the files that published weights, or a run of them, have."""
    home = _home_of(path)
    found: set[int] = set()
    for name in (CONFIG, _SPECIAL, GENERATION):
        ends = object_in(home / name).get("eos_token_id")
        found |= {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    return frozenset(found)


def _of_bytes(run: Path) -> bool:
    """Whether a run was trained on bytes."""
    return _name_in(run) == ByteTokenizer.name


def _name_in(run: Path) -> str | None:
    """What the config.toml of a run calls its tokenizer, if it has one."""
    path = run / "config.toml"
    return load(path, [], of_run=True).data.tokenizer if path.is_file() else None


def refuse_another(run: Path, tokens: Tokens) -> None:
    """ValueError where a run that goes on would read tokens of another tokenizer."""
    rules = rules_of_bytes() if tokens.tokenizer == ByteTokenizer.name else tokens.json
    if (run / RULES).is_file():
        where = str(run / RULES)
        with reading(run / RULES, "no readable tokenizer", "put back the one that the run had"):
            same = same_rules(files.read(where, files.MOST_JSON).decode(), rules)
    else:
        where = _name_in(run)
        same = where in (None, tokens.tokenizer)
    if not same:
        raise ValueError(
            f"data.path: its tokens are of another tokenizer ({tokens.tokenizer}, vocabulary "
            f"{tokens.vocabulary}) than those that {run} was trained on; make a token file with "
            f"python -m hpc3d.prepare TEXT -o tokens.h5 --tokenizer {where}"
        )
