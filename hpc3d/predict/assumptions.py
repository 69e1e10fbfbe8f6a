"""Sizes of a mixture-of-experts model, and the assumptions made in predicting its performance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc3d.console.sanitize import counted
from hpc3d.model.families import family_of, parameters

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


_DOCUMENTS = [
    "assumed         documents of any length: attention computes the scores between documents and",
    "                masks them, so the step time does not depend on the document lengths",
]


def of_mixture(config: Config) -> dict[str, Any]:
    """Return the sizes of a mixture-of-experts model as a dict, which is empty for a dense model.

    The vocabulary size in `config` must be resolved. `parameters` is the total number of
    parameters, and `active` is the number of parameters used per token. `blocks` is the number of
    blocks with experts. `slots` is the capacity of an expert, the maximum number of tokens that it
    processes per routing group: `capacity` (the capacity factor) times top_k g / E, rounded up,
    but at most g, for g = `group` tokens per routing group and E experts. If `capacity` is 0,
    `slots` is the number for a balanced load, and `group` is the number of tokens of a rank in a
    microbatch.
    """
    model = config.model
    experts = family_of(model).sizes(model, model.vocabulary).experts
    if not experts:
        return {}
    group = config.routing_group()
    total, active = parameters(model)
    return {
        "parameters": int(total),
        "active": int(active),
        "blocks": model.layers // experts.every,
        "group": group,
        "slots": experts.slots(group),
        "capacity": experts.capacity,
    }


def lines(config: Config) -> list[str]:
    """Return lines of text with a mixture-of-experts model's sizes and the assumptions made.

    The list is empty for a dense model, unless sequences are divided into documents.
    """
    documents = _DOCUMENTS if config.data.boundaries else []
    found = of_mixture(config)
    if not found:
        return documents
    model = config.model
    total, active = _short(found["parameters"]), _short(found["active"])
    blocks = f"{found['blocks']} of {counted(model.layers, 'block')}"
    return [
        f"parameters      {total}, of which {active} are active per token (used to compute FLOPs "
        "and MFU)",
        f"experts         {model.experts} in {blocks}, top_k {model.top_k}",
        *_slot_lines(config, counted(found["slots"], "slot"), found["group"]),
        *documents,
    ]


def _slot_lines(config: Config, slots: str, group: int) -> list[str]:
    """Return lines with the `slots` of an expert for `group` tokens, and their cost."""
    capacity, tokens = config.model.capacity, counted(group, "token")
    if not capacity:
        return [
            f"assumed         no capacity limit: {slots} per expert for the {tokens} of a rank",
            "                in a microbatch; if an expert receives more than 1.25 times the mean",
            "                number of tokens, the number of slots is doubled until it suffices",
        ]
    whole = "sequence" if group == config.model.sequence else "part of a sequence"
    return [
        f"assumed         capacity {capacity:g}: {slots} per expert for a {whole} of {tokens}",
        "                the step time does not depend on the load balance, because empty slots",
        "                are also sent and processed",
    ]


def _short(count: float) -> str:
    """Format a count with four significant digits and an SI prefix, such as 1.571 T."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return str(count)
