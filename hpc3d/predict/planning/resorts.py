"""Memory-saving fallbacks that the planner tries if no layout fits in memory.

Fallbacks that leave the results of a run unchanged are tried first, followed by those with an
increasing effect on the results. Each fallback is applied to the layouts with the lowest peak
memory. The search is then repeated with the first fallback that makes one of these layouts fit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.config.load import load
from hpc3d.config.parallel_rules import wrong_offload
from hpc3d.config.rules import not_there_yet, unknown_values
from hpc3d.predict.planning.estimate import Estimate, Estimator
from hpc3d.predict.planning.layouts import problems

if TYPE_CHECKING:
    from pathlib import Path

    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.search import Found, Search

log = logging.getLogger(__name__)
_NEAREST = 8  # number of layouts to which each fallback is applied


class Resort(NamedTuple):
    """Fallback configuration, defined as a set of changes to the keys of an input file.

    `exact` is True if the changes leave all results of a run unchanged.
    """

    changes: tuple[tuple[str, str], ...]
    exact: bool = False

    @property
    def text(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.changes)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.changes)

    @property
    def words(self) -> list[str]:
        return [word for key, value in self.changes for word in (f"--{key}", value)]

    @property
    def effect(self) -> str:
        return "which leaves results unchanged" if self.exact else "which changes results"

    def plain(self) -> dict[str, Any]:
        """Return a JSON-serializable dict for `--json`."""
        return {"changes": dict(self.changes), "exact": self.exact}


_OFFLOAD = "parallel.offload"
_INT8, _ADAFACTOR = ("parallel.keep_dtype", "int8"), ("train.optimizer", "adafactor")
RESORTS = (
    Resort(((_OFFLOAD, '["optimizer"]'),), exact=True),
    Resort(((_OFFLOAD, '["activations"]'),), exact=True),
    Resort(((_OFFLOAD, '["optimizer","activations"]'),), exact=True),
    Resort(((_OFFLOAD, '["optimizer","activations","parameters"]'),), exact=True),
    Resort((("parallel.keep_dtype", "bfloat16"),)),
    Resort((_INT8,)),
    Resort((("train.optimizer", "adamw-8bit"),)),
    Resort((_ADAFACTOR,)),
    Resort((_INT8, _ADAFACTOR)),
    Resort(((_OFFLOAD, '["activations","parameters"]'), _ADAFACTOR)),
)


class FallbackLayout(NamedTuple):
    """Best layout with a fallback.

    `config` is the input with the changes of the fallback. `estimate` is the fastest layout that
    fits in memory or, if `fits` is False, the one with the lowest peak.
    """

    resort: Resort
    config: Config
    estimate: Estimate
    fits: bool


def fallback_layouts(
    source: Path | str, overrides: Sequence[str], search: Search, found: Found
) -> Iterator[FallbackLayout]:
    """Yield the best layout with each valid fallback.

    Each fallback is tried on the _NEAREST layouts with the lowest peak memory.
    """
    nearest = sorted(
        (min(each.offers, key=lambda offer: offer.peak) for each in found.timed),
        key=lambda offer: offer.peak,
    )[:_NEAREST]
    for resort in RESORTS:
        log.info("no layout fits; trying %s", resort.text)
        try:
            config = load(source, [*overrides, *resort.words])
        except ValueError:
            continue
        if [*unknown_values(config), *not_there_yet(config)]:
            continue
        estimator = Estimator(search.estimator.vocabulary, search.estimator.machine)
        changed = [_changed(offer.config, config) for offer in nearest]
        estimates = [
            estimator.estimate(each)
            for each in changed
            if not [*wrong_offload(each), *problems(each, search.ranks)]
        ]
        fitting = [each for each in estimates if search.candidates.fits(each)]
        if fitting:
            yield FallbackLayout(resort, config, min(fitting, key=lambda each: each.seconds), True)
        elif estimates:
            smallest = min(estimates, key=lambda each: each.peak)
            yield FallbackLayout(resort, config, smallest, False)


def _changed(layout: Config, config: Config) -> Config:
    """Return a copy of `layout` in which some keys have the values from `config`.

    These keys are the section `[train]`, `parallel.keep_dtype` and `parallel.offload`.
    """
    kept = {key: getattr(config.parallel, key) for key in ("keep_dtype", "offload")}
    return replace(layout, train=config.train, parallel=replace(layout.parallel, **kept))
