"""Which tokens are masked, for models that learn what they were (Devlin et al. 2019, section 3.1).

Of every 100 tokens 15 are targets: 80 % of these are replaced by [MASK], the last token of the
vocabulary, 10 % by another token, and 10 % stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc3d.data.batches import Batches
from hpc3d.model.families import family_of
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.ops.random import philox_draws, philox_key

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.data.token_file import Tokens

_TARGETS, _MASKED, _REPLACED = 0.15, 0.8, 0.9  # of tokens; of targets, and those before it
_DRAWS = 4  # of a token, of which three are used: one value of the generator's counter


def batches_of(config: Config, tokens: Tokens) -> Batches:
    """The batches that a run with a settled vocabulary learns from."""
    model = config.model
    sizes = model.sequence, config.train.batch, config.seed
    if family_of(model).causal:
        return Batches(tokens, *sizes)
    assert model.vocabulary
    return MaskedBatches(tokens, *sizes, model.vocabulary, model.padding)


class MaskedBatches(Batches):
    """The batches of a run, masked.

    What becomes of token number e of a step's batch is made of draws 4 e to 4 e + 2 of the key
    (seed, "masking", step): the same on every mesh, and where a run goes on.  Tokens that are
    `padding` are no targets.
    """

    AHEAD = 0

    def __init__(
        self,
        tokens: Tokens,
        sequence: int,
        batch: int,
        seed: int,
        vocabulary: int,
        padding: int | None = None,
    ) -> None:
        super().__init__(tokens, sequence, batch, seed)
        self._seed, self._mask, self._padding = seed, vocabulary - 1, padding

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of a step, each int32 [batch, sequence] and contiguous; where
        nothing is to be told the target is IGNORE."""
        tokens, _ = super().batch(step)
        draws = philox_draws(philox_key((self._seed, "masking", step)), 0, _DRAWS * tokens.size)
        drawn, kind, other = draws.reshape(*tokens.shape, _DRAWS).transpose(2, 0, 1)[:3]
        chosen = _below_one(drawn) < _TARGETS
        if self._padding is not None:
            chosen &= tokens != self._padding
        kind = _below_one(kind)
        masked = np.where(kind < _MASKED, self._mask, self._tokens_of(other))
        inputs = np.where(chosen & (kind < _REPLACED), masked, tokens)
        return inputs.astype(np.int32), np.where(chosen, tokens, np.int32(IGNORE))

    def _tokens_of(self, draws: np.ndarray) -> np.ndarray:
        """Tokens at random, neither [MASK] nor padding."""
        if self._padding is None:
            return (draws % np.uint64(self._mask)).astype(np.int32)
        tokens = (draws % np.uint64(self._mask - 1)).astype(np.int32)
        return tokens + (tokens >= self._padding)


def _below_one(draws: np.ndarray) -> np.ndarray:
    """64-bit draws as numbers from 0 to below 1."""
    return (draws >> np.uint64(11)) * 2.0**-53
