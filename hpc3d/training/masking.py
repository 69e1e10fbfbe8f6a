"""Masking of tokens for masked language models (Devlin et al. 2019, section 3.1).

15 % of the tokens are prediction targets. Of these, 80 % are replaced by [MASK], 10 % are replaced
by a random token, and 10 % are unchanged. If the tokenizer has no [MASK] token, the last token of
the vocabulary is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.data.batches import Batches
from hpc3d.data.mixture import by_key
from hpc3d.data.validation import VALIDATION, ValidationBatches, naming_key
from hpc3d.model.families import family_of
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.ops.random import below_one, philox_draws, philox_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc3d.config.input_file import Config
    from hpc3d.data.token_file import Tokens

# _TARGETS: fraction of tokens that are prediction targets.
# _MASKED: fraction of the targets that are masked.
# _REPLACED: fraction of the targets that are masked or replaced with a random token.
_TARGETS, _MASKED, _REPLACED = 0.15, 0.8, 0.9
_DRAWS = 4  # number of random numbers generated per token, of which three are used


def batches_of(config: Config, tokens: Tokens) -> Batches:
    """Return the training batches of a run; `config` must contain the vocabulary size.

    Raises
    ------
    ValueError
        If a text has too few tokens, or its documents cannot be shuffled because the
        end-of-document token is unknown.
    """
    shape = config.model.sequence, config.train.batch
    if family_of(config.model).causal:
        batches = Batches(tokens, *shape, config.seed)
    else:
        batches = MaskedBatches(tokens, *shape, config.seed, _masking_of(config, tokens))
    if config.data.shuffle == "documents":
        end = tokens.end() if config.data.separator is None else config.data.separator
        if end is None:
            raise ValueError(
                "data.shuffle = documents: the tokenizer of data.path has no known "
                "end-of-document token; leave the key out, or prepare the text with --end TOKEN"
            )
        batches.shuffle_documents(end)
    return batches


def validation_of(config: Config, tokens: Tokens, remainder: bool = False) -> ValidationBatches:
    """Return the evaluation batches of a run; `config` must contain the vocabulary size.

    With `remainder`, the batches of a causal model also cover the tokens after the last full
    window. A masked model would attend to the padding of an incomplete window.
    """
    sequence, train = config.model.sequence, config.train
    if family_of(config.model).causal:
        return ValidationBatches(tokens, sequence, train.batch, train.eval_batches, remainder)
    masking = _masking_of(config, tokens)
    return MaskedValidation(tokens, sequence, train.batch, train.eval_batches, masking)


def validations_of(config: Config, texts: Sequence[Tokens]) -> list[ValidationBatches]:
    """Return the evaluation batches of each validation text of a run.

    The batches cover the complete text if train.eval_batches = 0, and full windows otherwise.
    Raises a one-line ValueError that begins with the key of a text if the text is too short.
    """
    found = []
    for key, text in by_key(VALIDATION, texts).items():
        with naming_key(key):
            remainder = not config.train.eval_batches
            found.append(validation_of(config, text, remainder))
    return found


def _masking_of(config: Config, tokens: Tokens) -> Masking:
    assert config.model.vocabulary
    last, mask = config.model.vocabulary - 1, tokens.mask()
    return Masking(last + 1, last if mask is None else mask, config.model.padding)


class Masking(NamedTuple):
    """Masking rule for tokens 0 to `vocabulary` - 1, with the mask token `mask`.

    Tokens equal to `padding` are never targets.
    """

    vocabulary: int
    mask: int
    padding: int | None = None

    def masked(self, tokens: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return masked inputs and targets, int32 arrays with the shape of `tokens`, [B, T].

        The target of a token that is not predicted is IGNORE. The token at flat index e uses the
        random numbers 4 e, 4 e + 1 and 4 e + 2 of the stream with the key `key`.
        """
        draws = philox_draws(key, 0, _DRAWS * tokens.size)
        drawn, kind, other = draws.reshape(*tokens.shape, _DRAWS).transpose(2, 0, 1)[:3]
        chosen = below_one(drawn) < _TARGETS
        if self.padding is not None:
            chosen &= tokens != self.padding
        kind = below_one(kind)
        masked = np.where(kind < _MASKED, self.mask, self._tokens_of(other))
        inputs = np.where(chosen & (kind < _REPLACED), masked, tokens)
        return inputs.astype(np.int32), np.where(chosen, tokens, np.int32(IGNORE))

    def _tokens_of(self, draws: np.ndarray) -> np.ndarray:
        """Map 64-bit random numbers to tokens other than the mask token and the padding token."""
        left_out = sorted({self.mask, self.padding} - {None})
        tokens = (draws % np.uint64(self.vocabulary - len(left_out))).astype(np.int32)
        for token in left_out:
            tokens += tokens >= token
        return tokens


class MaskedBatches(Batches):
    """Masked training batches.

    The masks depend only on the key (seed, "masking", step), so they are the same on every mesh
    and in a resumed run.
    """

    AHEAD = 0

    def __init__(
        self, tokens: Tokens, sequence: int, batch: int, seed: int, masking: Masking
    ) -> None:
        super().__init__(tokens, sequence, batch, seed)
        self._masking = masking

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the contiguous inputs and targets of a step, each int32 [batch, sequence]."""
        tokens, _ = super().batch(step)
        return self._masking.masked(tokens, philox_key((self._seed, "masking", step)))


class MaskedValidation(ValidationBatches):
    """Masked evaluation batches, which are identical in every evaluation and for every seed."""

    def __init__(
        self, tokens: Tokens, sequence: int, batch: int, most: int, masking: Masking
    ) -> None:
        super().__init__(tokens, sequence, batch, most)
        self._masking = masking

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the contiguous inputs and targets of a batch, each int32 [batch, sequence]."""
        tokens, shifted = super().batch(number)
        inputs, targets = self._masking.masked(tokens, philox_key(("validation", number)))
        return inputs, np.where(shifted == IGNORE, shifted, targets)
