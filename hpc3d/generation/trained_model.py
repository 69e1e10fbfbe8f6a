"""Trained model, from a run's checkpoint or a Hugging Face model folder.

Rank 0 finds and validates the model. Every rank then opens the weight files and reads its own
shards of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.checkpoints.block_slices import BlockSlices, whole_of
from hpc3d.checkpoints.hf_export import INDEX, WEIGHTS
from hpc3d.checkpoints.hf_import import ADAPTER, Pretrained, configured, refuse_hub_name
from hpc3d.checkpoints.hf_settings import CONFIG
from hpc3d.checkpoints.inspect import checkpoints, config_of, newest_whole
from hpc3d.checkpoints.run_tokenizer import end_ids, kept_tokenizer
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.config import package_data
from hpc3d.config.input_file import Config
from hpc3d.config.load import options
from hpc3d.console import small_files
from hpc3d.console.sanitize import Problems
from hpc3d.data.token_file import tokenizer_of
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from hpc3d.data.tokenizer_files import SAVE_TOKENIZER, object_in
from hpc3d.model.families import FAMILIES, family_of

_TOKENIZER = "tokenizer.json"
DOCUMENTS = "data.boundaries", "data.separator"
_LAYOUT = ("mesh.", "parallel.", "train.dtype", "train.backend", "train.tf32")


class WeightSource(NamedTuple):
    """Path of a checkpoint or, if `published` is true, of a Hugging Face model folder."""

    path: Path
    published: bool

    def open(self, config: Config) -> Checkpoint | PublishedValues:
        """Open the weights, so that `checkpoints.sharded.restore` can read them.

        Raises ValueError if they cannot be read.
        """
        if self.published:
            pretrained = Pretrained(self.path)
            pretrained.check(config.model)  # also locates the rows of fused arrays (Phi-3)
            return PublishedValues(pretrained, config)
        return Checkpoint(self.path)


class FoundWeights(NamedTuple):
    """Configuration of a trained model, its weights, and the problems of skipped checkpoints."""

    config: Config
    source: WeightSource
    notes: Sequence[str] = ()


class TrainedModel(NamedTuple):
    """Trained model: its configuration, its tokenizer, and the location of its weights.

    Generation stops at any token in `ends`. An empty prompt is replaced by the token `begin`. If
    the model was trained on separate documents, `separator` ends a document.
    """

    config: Config
    tokenizer: Tokenizer
    source: WeightSource
    ends: frozenset[int]
    begin: int | None
    notes: Sequence[str] = ()

    @property
    def choices(self) -> int:
        """Number of token ids that may be sampled, excluding vocabulary padding."""
        return min(self.config.model.vocabulary, self.tokenizer.vocabulary)

    @property
    def separator(self) -> int:
        """Token that ends a document, or -1 if tokens attend across documents."""
        found = self.config.data.separator
        return -1 if found is None else found

    def prompt(self, text: bytes) -> np.ndarray:
        """Return the token ids of a prompt as an int64 array.

        Special tokens of the tokenizer are recognized in the text, as in `transformers`.
        Raises ValueError if the prompt cannot be encoded.
        """
        try:
            ids = self.tokenizer.encode(text, special=True).astype(np.int64)
        except UnicodeDecodeError:
            raise ValueError(
                "--prompt: the text is not valid UTF-8; convert it to UTF-8 with iconv"
            ) from None
        except ValueError as error:
            raise ValueError(f"--prompt: {error}; use a different prompt") from error
        if not len(ids):
            if self.begin is None:
                raise ValueError(
                    "--prompt is empty, and the tokenizer has no start token; give at least one "
                    "word"
                )
            ids = np.array([self.begin], np.int64)
        known = self.config.model.vocabulary
        if ids.max() >= known:
            raise ValueError(
                f"--prompt contains token {ids.max()}, but the model's vocabulary has {known} "
                f"tokens; use the {_TOKENIZER} that the model was trained with"
            )
        return ids

    def last_document(self, ids: np.ndarray) -> np.ndarray:
        """Return the token ids of the last document of a prompt, including its separator."""
        ends = np.flatnonzero(ids[:-1] == self.separator)
        return ids[ends[-1] + 1 :] if len(ends) else ids


class PublishedValues:
    """Weights in a Hugging Face model folder, read by the same methods as a checkpoint."""

    def __init__(self, pretrained: Pretrained, config: Config) -> None:
        self.pretrained, self.config = pretrained, config
        self._last = "", np.empty((0, 0))

    def exact(self, name: str) -> str:
        """Return the name of the array that stores a tensor's values in full precision."""
        return "value"

    def fill(self, array: np.ndarray, name: str, kind: str, box: BlockSlices) -> None:
        """Copy the slice `box` of a parameter into `array`, which has the same shape."""
        if self._last[0] != name:
            self._last = name, self.pretrained.parameter(name, self.config)
        value = self._last[1]
        whole = whole_of(value.shape)
        array[...] = value.reshape(whole.shape)[box.index_in(whole)]


def find_model(path: Path, words: Sequence[str]) -> TrainedModel:
    """Find and validate the model at `path`; called on rank 0.

    `words` are command-line options such as `--section.key value`. This function uses
    `--data.path` for a run, and `--model.KEY` for a Hugging Face model. Raises ValueError if the
    model is invalid or cannot generate text, or if `words` has an option other than these and
    those in `_LAYOUT`.
    """
    published = is_published(path)
    refuse_others("generate", words, (*_LAYOUT, "model." if published else "data.path"))
    weights = find_weights("generate", path, words)
    found = _published(path, weights) if published else _of_run(path, weights, words)
    if not family_of(found.config.model).causal:
        able = [kind for kind, family in FAMILIES.items() if family.causal]
        kind = found.config.model.kind
        raise ValueError(
            f"{path}: {kind} models do not support text generation; supported models: "
            f"{', '.join(able)}"
        )
    return found


def is_published(path: Path) -> bool:
    """Return True if `path` is a Hugging Face model, not a run or a checkpoint."""
    return path.suffix in (".safetensors", ".pt") or any(
        (path / name).exists() for name in (CONFIG, WEIGHTS, INDEX, ADAPTER, "snapshots")
    )


def find_weights(verb: str, path: Path, words: Sequence[str]) -> FoundWeights:
    """Find and validate the weights at `path` for the command `verb`; called on rank 0.

    For a Hugging Face model, options `--model.KEY` and those in DOCUMENTS in `words` are applied.
    Raises ValueError if the weights are invalid.
    """
    if is_published(path):
        given = ["--model.dropout", "0", *words_with(words, ("model.", *DOCUMENTS))]
        config = configured(Pretrained(path), given)
        return FoundWeights(config, WeightSource(path, published=True))
    refuse_hub_name(path)
    opened, wrong = newest_whole(checkpoints(path))
    config = config_of(opened)
    if config.torch.factory:
        raise ValueError(
            f"{path}: {verb} does not support torch modules ({config.torch.factory}); choose a "
            "run of an hpc3d model"
        )
    return FoundWeights(config, WeightSource(opened.folder, published=False), wrong)


def refuse_others(verb: str, words: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError if an option in `words` does not begin with one of the names `known`."""
    names = ", ".join(f"--{name}" for name in known)
    problems = [
        f"{option}: the trained model determines this key; {verb} accepts only {names}"
        for option, _ in options(words)
        if not option.removeprefix("--").startswith(tuple(known))
    ]
    if problems:
        raise Problems(problems)


def layout_words(words: Iterable[str]) -> list[str]:
    """Return the options in `words` that determine the layout of the ranks."""
    return words_with(words, _LAYOUT)


def words_with(words: Iterable[str], beginnings: tuple[str, ...]) -> list[str]:
    """Return the options in `words` that begin with one of `beginnings`, and their values."""
    return [
        word
        for option, text in options(words)
        if option.removeprefix("--").startswith(beginnings)
        for word in (option, text)
    ]


def _of_run(path: Path, found: FoundWeights, words: Sequence[str]) -> TrainedModel:
    config, source, notes = found
    tokenizer = _tokenizer_of_run(config, path, dict(options(words)).get("--data.path"))
    ends = end_ids(path) | ({tokenizer.end, config.data.separator} - {None})
    return TrainedModel(config, tokenizer, source, ends, tokenizer.end, notes)


def _tokenizer_of_run(config: Config, path: Path, text: str | None) -> Tokenizer:
    """Return the tokenizer stored in the token file `text`.

    If `text` is `None`, return the tokenizer of the training run.
    """
    name, vocabulary = config.data.tokenizer, config.model.vocabulary
    if text is None and (kept := kept_tokenizer(path)):
        return kept
    if text is None and (name == ByteTokenizer.name or (name is None and vocabulary == 256)):
        return ByteTokenizer()
    if text is None and name is None:
        raise ValueError(
            f"{path}: the run has a vocabulary of {vocabulary} tokens but no tokenizer; set "
            "--data.path to a token file (.h5) with its tokenizer, or generate from the folder "
            "from which the model was imported"
        )
    return tokenizer_of(package_data.text_path(text or config.data.paths()[0]))


def _published(path: Path, found: FoundWeights) -> TrainedModel:
    config, source, _ = found
    tokenizer = _published_tokenizer(path, config.model.vocabulary)
    settings = object_in((path if path.is_dir() else path.parent) / CONFIG)
    return TrainedModel(config, tokenizer, source, end_ids(path), settings.get("bos_token_id"))


def _published_tokenizer(path: Path, vocabulary: Any) -> Tokenizer:
    """Return the tokenizer in the model folder.

    If the folder has none and the vocabulary has 256 tokens, return a ByteTokenizer.
    """
    file = (path if path.is_dir() else path.parent) / _TOKENIZER
    if file.exists():
        try:
            return BpeTokenizer(small_files.read(file, small_files.MOST_JSON).decode())
        except UnicodeDecodeError:
            raise ValueError(f"{file}: not UTF-8") from None
    if vocabulary != ByteTokenizer.vocabulary:
        raise ValueError(
            f"{path}: no {_TOKENIZER} for the vocabulary of {vocabulary} tokens; {SAVE_TOKENIZER}"
        )
    return ByteTokenizer()
