"""The rules of mixtures of experts: their numbers, and what goes together with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.model.families import EXPERT_KEYS

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def wrong_experts(config: Config) -> Iterator[str]:
    """Mixtures that cannot be, and keys of mixtures where there is no mixture."""
    if config.model.experts:
        yield from _wrong_numbers(config)
        yield from _wrong_split(config)
        yield from _wrong_bias(config)
    else:
        yield from _without_experts(config)


def _without_experts(config: Config) -> Iterator[str]:
    """Keys that have a meaning with experts alone."""
    for key in EXPERT_KEYS:
        value = getattr(config.model, key)
        if value != getattr(type(config.model), key):
            yield f"model.{key} = {value}: of mixtures; leave it out, or set model.experts"
    if config.mesh.e > 1:
        yield f"mesh.e = {config.mesh.e}: has a share of the experts; use 1, or set model.experts"


def _wrong_numbers(config: Config) -> Iterator[str]:
    model, e = config.model, config.mesh.e
    if model.top_k > model.experts:
        yield (
            f"model.top_k = {model.top_k}: a token goes to each of model.experts = "
            f"{model.experts} once at most; use at most {model.experts}, or more experts"
        )
    if model.moe_every > model.layers:
        yield (
            f"model.moe_every = {model.moe_every}: none of model.layers = {model.layers} blocks "
            f"has experts; use at most {model.layers}"
        )
    if model.experts % e:
        yield (
            f"model.experts = {model.experts} does not divide over mesh.e = {e}: use a multiple "
            f"of {e}, or another mesh.e"
        )


def _wrong_split(config: Config) -> Iterator[str]:
    """Blocks of X that one rank of several has: the others would have no token to send."""
    if owned := config.splits["dense"].own:
        yield (
            f"model.experts = {config.model.experts}: not where one rank on the diagonal of "
            f"{owned} has a block of X ({config.parallel.way}); use scheme 3d"
        )


def _wrong_bias(config: Config) -> Iterator[str]:
    """A bias that is too coarse for its steps."""
    rate, dtype = config.model.balance_bias, config.train.dtype
    if rate and dtype in ("float16", "bfloat16"):
        yield (
            f"model.balance_bias = {rate}: {dtype} rounds its steps away; use model.balance_loss "
            "and model.balance_bias = 0, or train.dtype = float32"
        )
