"""What a prediction takes for granted of a mixture of experts, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc3d.model.families import family_of, parameters
from hpc3d.plain import counted

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def of_mixture(config: Config) -> dict[str, Any]:
    """Plain values of a mixture whose vocabulary is settled, {} of a dense model: `parameters` and
    the `active` ones, those that a token meets; `slots` of an expert for a sequence, which are
    `capacity` times its even share, top_k s / E."""
    model = config.model
    experts = family_of(model).sizes(model, model.vocabulary).experts
    if not experts:
        return {}
    total, active = parameters(model)
    return {
        "parameters": int(total),
        "active": int(active),
        "blocks": model.layers // experts.every,
        "slots": experts.slots(model.sequence),
        "capacity": experts.capacity,
    }


def lines(config: Config) -> list[str]:
    """The same as lines to print: nothing that is predicted depends on who goes where."""
    found = of_mixture(config)
    if not found:
        return []
    model = config.model
    total, active = _short(found["parameters"]), _short(found["active"])
    room = f"capacity {model.capacity:g}" if model.capacity else "room for all"
    blocks = f"{found['blocks']} of {counted(model.layers, 'block')}"
    slots = counted(found["slots"], "slot")
    return [
        f"parameters      {total}, of which a token meets {active}: these count for FLOP and MFU",
        f"experts         {model.experts} in {blocks}, top_k {model.top_k}",
        f"assumed         {room}: {slots} of each expert for a sequence of {model.sequence}, all "
        "sent and computed,",
        "                full or empty, so no step depends on the balance",
    ]


def _short(count: float) -> str:
    """A count with four digits, as 1.571 T."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return str(count)
