"""Text report that compares predicted with published Megatron-LM step times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hpc3d.config.package_data import shipped
from hpc3d.predict.machine.machine_file import load
from hpc3d.studies import megatron
from hpc3d.studies.megatron import (
    ASSUMED,
    RECOMPUTATION,
    SELENE,
    WEAK_SCALING,
    errors,
    rows,
    weak,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.predict.machine.machine import Machine
    from hpc3d.studies.megatron import PublishedStep


def main(options: Namespace) -> dict[str, Any]:
    """Print and return the predictions for a machine (default: Selene)."""
    machine = load(options.machine or shipped(SELENE))
    found = {
        "recomputation": _steps("arXiv:2205.05198, table 5", RECOMPUTATION, machine),
        "layers": _layers(machine),
        "states": _states(),
        "facts": _facts(machine),
    }
    scaled = [weak(values) for values in WEAK_SCALING]
    found["weak scaling"] = _steps("SC '21 (arXiv:2104.04473), table 1", scaled, machine)
    found["otherwise"] = _otherwise(machine)
    print(f"\n{ASSUMED}")
    return found


def _steps(title: str, listed: Iterable[PublishedStep], machine: Machine) -> dict[str, Any]:
    print(f"\n{title}: seconds per step")
    print("    model    ranks recompute  published  predicted   error  bubble    comm")
    found = []
    for row in listed:
        found += rows([row], machine)
        print("   ", _line(found[-1]), flush=True)
    worst = errors(found)
    print(f"    absolute error: mean {worst['mean']:.1%}, maximum {worst['worst']:.1%}")
    return {"rows": found, "errors": worst}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:8s} {row['ranks']:5d} {row['recompute']:10s}{row['published_s']:10.2f} "
        f"{row['predicted_s']:10.2f} {row['error']:+7.1%} {row['bubble']:7.1%} "
        f"{row['communication']:7.1%}"
    )


def _layers(machine: Machine) -> list[dict[str, Any]]:
    print(
        "\narXiv:2205.05198, table 4: forward and backward times per layer of the 22B model in ms"
    )
    print("    scheme      recompute       published       predicted")
    found = megatron.layers(machine)
    for row in found:
        times = "".join(
            f"{forward:9.1f} {backward:6.1f}"
            for forward, backward in (row["published_ms"], row["predicted_ms"])
        )
        print(f"    {row['scheme']:11s} {row['recompute']:10s}{times}")
    return found


def _states() -> list[dict[str, Any]]:
    print("\narXiv:2205.05198, figure 1: GiB of parameters and optimizer state per rank, for")
    print("18 bytes per parameter and 12 L h^2 / n parameters (L layers, hidden size h, n ranks).")
    print("Columns: published; predicted without embedding tables; relative error; with tables")
    found = megatron.states()
    for row in found:
        sizes = f"{row['published_GiB']:9.2f} {row['predicted_GiB']:9.2f} {row['error']:+6.1%}"
        print(f"    {row['model']:6s}{sizes}{row['with_tables_GiB']:9.2f}")
    return found


def _facts(machine: Machine) -> dict[str, list[float]]:
    print(
        "\nRelative errors of the predictions for the 22B model with modified machine models"
        "\n(columns: modification; full recomputation; selective recomputation)"
    )
    found = megatron.facts(machine)
    for fact, (full, selective) in found.items():
        print(f"    {fact:24s}{full:+8.1%}{selective:+8.1%}")
    return found


def _otherwise(machine: Machine) -> list[dict[str, Any]]:
    print("\nPredictions with options that differ from the published scripts")
    found = megatron.otherwise(machine)
    for row in found:
        (name, value), *_ = row["change"].items()
        print(f"    {name} = {value}:", _line(row))
    return found
