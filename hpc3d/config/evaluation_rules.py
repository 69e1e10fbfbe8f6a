"""The rules of evaluations while training: data.validation, train.eval_every, keep_best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def wrong_evaluation(config: Config) -> Iterator[str]:
    """Evaluations without a text, and what is to be kept without evaluations."""
    share, every = config.data.validation, config.train.eval_every
    if every > 0 and config.torch.factory:
        yield f"train.eval_every = {every}: not for torch modules; use 0"
    elif every > 0 and share in (None, ""):
        yield (
            f"train.eval_every = {every}: there is nothing to evaluate on; name a text with "
            "data.validation, or hold out a share of data.path, such as 0.05"
        )
    if config.checkpoint.keep_best and not every:
        yield (
            "checkpoint.keep_best = true: without evaluations none is the best; set "
            "train.eval_every, or keep_best = false"
        )
