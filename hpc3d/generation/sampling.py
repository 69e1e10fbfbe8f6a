"""Next-token sampling with a counter-based random generator keyed by (seed, sample, position)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpc3d.console.exit_codes import BadData
from hpc3d.ops.random import below_one, philox_draws, philox_key


class Sampling(NamedTuple):
    """Sampling parameters, with the same semantics as in Hugging Face `transformers`.

    The logits are divided by `temperature`. Top-k sampling keeps the `top_k` largest logits (0:
    all). Nucleus sampling then keeps the smallest set of most probable tokens whose probabilities
    add up to at least `top_p` (Holtzman et al. 2020, arXiv:1904.09751). A temperature of 0 always
    selects the token with the largest logit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def draw(self, logits: np.ndarray, sample: int, position: int) -> int:
        """Draw the token at a position of a sample, given logits [vocabulary].

        The token is drawn by inverse transform sampling with random number `position` of the
        stream (seed, sample), so the result does not depend on the layout of the ranks.
        """
        if not np.isfinite(logits.max()):
            raise BadData(
                f"the model's largest logit is {logits.max()}: training has diverged; generate "
                "from an earlier checkpoint"
            )
        if not self.temperature:
            return int(logits.argmax())
        chances = self.probabilities(logits).cumsum()
        draws = philox_draws(philox_key((self.seed, "generate", sample)), position, 1)
        uniform = below_one(draws)[0]
        return int(np.searchsorted(chances, uniform * chances[-1], side="right"))

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the token probabilities, float64[vocabulary], after top-k and top-p filtering."""
        scores = logits.astype(np.float64) / self.temperature
        if 0 < self.top_k < len(scores):
            scores[scores < np.partition(scores, -self.top_k)[-self.top_k]] = -np.inf
        p = np.exp(scores - scores.max())
        p /= p.sum()
        if self.top_p < 1:
            order = np.argsort(p, kind="stable")
            less = order[p[order].cumsum() <= 1 - self.top_p]
            p[less[less != order[-1]]] = 0
            p /= p.sum()
        return p
