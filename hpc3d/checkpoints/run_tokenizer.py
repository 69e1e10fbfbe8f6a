"""The tokenizer of a run, which is kept in its folder: generation and export need no text."""

from __future__ import annotations

import json
from pathlib import Path

from hpc3d.data.tokenizer import BpeTokenizer
from hpc3d.training.run_folder import write_text

_NAME, _SETTINGS = "tokenizer.json", "tokenizer_config.json"


def keep(folder: Path, text: str) -> None:
    """Write the JSON text of a tokenizer beside a run, or beside weights for `transformers`."""
    write_text(folder / _NAME, text)


def kept_tokenizer(path: Path) -> BpeTokenizer | None:
    """That of a run folder, of one of its checkpoints, or of published weights; None without."""
    for folder in (path, path.parent, path.parent.parent):
        if (folder / _NAME).is_file():
            return BpeTokenizer((folder / _NAME).read_text(encoding="utf-8"))
    return None


def export(tokenizer: BpeTokenizer, target: Path) -> None:
    """Write a tokenizer as AutoTokenizer of `transformers` reads it."""
    folder = target if target.is_dir() else target.parent
    keep(folder, tokenizer.json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if end := tokenizer.end_name:
        settings |= {"eos_token": end, "bos_token": end, "unk_token": end}
    write_text(folder / _SETTINGS, json.dumps(settings, indent=1) + "\n")


def refuse_another(run: Path, text: str) -> None:
    """ValueError where a run that goes on would read tokens of another tokenizer."""
    kept = kept_tokenizer(run)
    if kept and json.loads(kept.json) != json.loads(text):
        raise ValueError(
            f"data.path: its tokens are of another tokenizer than {run / _NAME}, with which the "
            "model was trained; give a text of that one"
        )
