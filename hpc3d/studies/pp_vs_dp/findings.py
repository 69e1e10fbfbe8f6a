"""Reproduce the four findings of arXiv:2407.02081 with tables of simulated training steps.

1. Pipeline parallelism is faster than data parallelism in some cases, but not in all.
2. The total memory of all ranks increases with the number of stages, especially if the layers are
   partitioned unevenly.
3. The message size affects the step time.
4. Wait times contribute to the cost of communication, in addition to transfer times.

A last table compares data, pipeline and tensor parallelism side by side.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

from hpc3d.config.package_data import shipped
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.pp_vs_dp.comparison import by_microbatches, races
from hpc3d.studies.pp_vs_dp.experiment import dtype_of
from hpc3d.studies.pp_vs_dp.message_sizes import buckets, microbatches
from hpc3d.studies.pp_vs_dp.stage_balance import partitions
from hpc3d.studies.pp_vs_dp.strategies import strategies
from hpc3d.studies.pp_vs_dp.wait_times import waiting

_STATES = ("parameter", "gradient", "optimizer")
H100 = "machines/h100.toml"
_WHY = {"": " ", "bubble": "b", "messages": "m", "passes": "s", "sums": "d"}


def findings(machine: Machine) -> dict[str, Any]:
    """Return a dict with the rows of each table, the machine name and the dtype.

    Times are in seconds and sizes in bytes.
    """
    return {
        "machine": machine.name,
        "dtype": dtype_of(machine),
        "races": races(machine),
        "by_microbatches": by_microbatches(machine),
        "partitions": partitions(machine),
        "buckets": buckets(machine),
        "microbatches": microbatches(machine),
        "waiting": waiting(machine),
        "strategies": strategies(machine),
    }


def main(options: Namespace) -> dict[str, Any]:
    """Print and return the findings for a machine (default: H100 GPUs)."""
    found = findings(load(options.machine or shipped(H100)))
    report(found)
    return found


def report(found: Mapping[str, Any]) -> None:
    print(f"{found['machine']}, {found['dtype']}")
    _print_races(found["races"], found["by_microbatches"])
    _print_partitions(found["partitions"])
    _print_messages(found["buckets"], found["microbatches"])
    _print_waiting(found["waiting"])
    _print_strategies(found["strategies"])


def _print_races(rows: Sequence[dict[str, Any]], counted: Sequence[dict[str, Any]]) -> None:
    count = rows[0]["ranks"]
    print(f"\n1. Step time of a pipeline of {count} stages relative to {count} replicas")
    for network, group in groupby(rows, lambda row: row["network"]):
        cells = [*group]
        fewer, wins = (_count(cells, key) for key in ("moves_less", "wins"))
        print(
            f"   {network}, {len(cells)} settings:"
            f"\n   the pipeline is faster in {wins} and moves fewer bytes in {fewer}"
        )
        _print_grid(cells)
    print("   b, m, s: the pipeline moves fewer bytes, but is slower, because of its bubble (b),")
    print(
        "   exposed communication (m) or inefficient small microbatches (s). d: the pipeline moves"
        "\n   more bytes, but is faster, because data parallelism reduces its gradients slowly"
    )
    large = sorted({row["hidden"] for row in rows if not row["data_fits"]})
    if large:
        print(
            "   data parallelism does not fit in memory with hidden size "
            f"{', '.join(map(str, large))}"
        )
    first, many = counted[0], [row["microbatches"] for row in counted if row["wins"] == "pipeline"]
    where = f"hidden {first['hidden']}, {first['tokens']:,} tokens"
    wins = ", ".join(map(str, many)) or "no number of"
    print(f"   {where}: the pipeline is faster with {wins} microbatches")
    print("   microbatches " + "".join(f"{row['microbatches']:7d}" for row in counted))
    print("   ratio        " + "".join(f"{_ratio(row):7.2f}" for row in counted))


def _count(rows: Sequence[dict[str, Any]], key: str) -> int:
    return sum(row[key] == "pipeline" for row in rows)


def _ratio(row: dict[str, Any]) -> float:
    return row["pipeline_s"] / row["data_s"]


def _print_grid(rows: Sequence[dict[str, Any]]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    print(
        "   hidden "
        + "".join(f"{number:10,d}" for number in tokens)
        + " tokens    fewer bytes below"
    )
    for hidden, group in groupby(rows, lambda row: row["hidden"]):
        cells = [*group]
        values = "".join(f"{_ratio(row):9.2f}{_WHY[row['why']]}" for row in cells)
        print(f"   {hidden:6d} {values} {cells[0]['boundary']:18,.0f}")


def _print_partitions(rows: Sequence[dict[str, Any]]) -> None:
    one, last = rows[0], {row["partition"]: row for row in rows}
    print("\n2. Memory of all ranks [GB] (in parentheses: layers x microbatches in flight)")
    print("   stages                states  copies  activations     buffers     total  worst rank")
    for row in rows:
        print(
            f"   {row['count']:3d} {row['partition']:8s}{_gb(row, 'states'):15.2f}"
            f"{_gb(row, 'copies'):8.2f}{_gb(row, 'activations'):8.2f} ({row['in_flight']:3d})"
            f"{_gb(row, 'buffers'):12.2f}{_gb(row, 'total'):10.2f}{_gb(row, 'worst'):12.2f}"
        )
    for name, row in last.items():
        times, worst = (row[key] / one[key] for key in ("total", "worst"))
        print(
            f"   {name}, {row['count']} stages: {times:.2f} times the memory of a single rank, "
            f"{worst:.2f} on the worst rank"
        )


def _gb(row: dict[str, Any], key: str) -> float:
    return row[key] / 1e9


def _print_messages(sums: Sequence[dict[str, Any]], tensors: Sequence[dict[str, Any]]) -> None:
    _print_buckets(sums)
    print("   scheme    microbatches   calls  message [MB]     n1/2  calls [ms]  step [ms]")
    for scheme, group in groupby(tensors, lambda row: row["scheme"]):
        rows = [*group]
        for row in rows:
            sizes = f"{row['message'] / 1e6:14.3f}{row['half'] / 1e6:9.2f}"
            times = f"{row['calls_s'] * 1e3:12.2f}{row['step_s'] * 1e3:11.2f}"
            print(f"   {scheme:10s}{row['microbatches']:12d}{row['calls']:8d}{sizes}{times}")
        moved, took = ends(rows, "calls", "message"), ends(rows, "calls_s")
        print(f"   {scheme}: {moved:.2f} times the bytes take {took:.1f} times as long", end="")
        print(f" if the messages are 1/{1 / ends(rows, 'message'):.0f} as large")


def ends(rows: Sequence[dict[str, Any]], *keys: str) -> float:
    """Return the product of the columns `keys` in the last row, relative to the first row."""
    first, last = (prod(row[key] for key in keys) for row in (rows[0], rows[-1]))
    return last / first


def _print_buckets(sums: Sequence[dict[str, Any]]) -> None:
    half = sums[0]["half"] / 1e6
    print(f"\n3. Gradient reduction by bucket size (half of the peak bandwidth at {half:.1f} MB)")
    print("   bucket [MB]  calls  message [MB]  step [ms], overlapped  after backward")
    hidden, after = ([row for row in sums if row["overlap"] is each] for each in (True, False))
    for row, late in zip(hidden, after, strict=True):
        message = row["message"] / 1e6
        print(f"   {row['bucket_mb']:11g}{row['calls']:7d}{message:14.2f}", end="")
        print(f"{row['step_s'] * 1e3:23.2f}{late['step_s'] * 1e3:16.2f}")
    best = min(hidden, key=lambda row: row["step_s"])
    first, last = (row["step_s"] / best["step_s"] - 1 for row in (hidden[0], hidden[-1]))
    print(
        f"   with overlap, {best['bucket_mb']:g} MB is fastest; step time {first:+.0%} at",
        end="",
    )
    print(f" {hidden[0]['bucket_mb']:g} MB and {last:+.0%} at {hidden[-1]['bucket_mb']:g} MB")


def _print_waiting(rows: Sequence[dict[str, Any]]) -> None:
    axes = [*rows[0]["wait_s"]]
    print("\n4. Uneven stages: wait + transfer time by axis, mean over ranks [ms]")
    print(f"   {'layers':12s} longest  step " + "".join(f"{axis:>16s}" for axis in axes))
    for row in rows:
        pairs = ((row["wait_s"][axis] * 1e3, row["transfer_s"][axis] * 1e3) for axis in axes)
        cells = "".join(f"{wait:8.2f} + {transfer:5.2f}" for wait, transfer in pairs)
        layers = ",".join(map(str, row["stages"]))
        print(f"   {layers:12s}{row['imbalance']:+8.0%}{row['step_s'] * 1e3:7.1f}{cells}")
    (wait, transfer), (waits, transfers) = map(_blocked, (rows[0], rows[-1]))
    print(f"   increase from the first to the last row: wait time x {waits / wait:.1f}, ", end="")
    print(f"transfer time x {transfers / transfer:.2f}")


def _blocked(row: dict[str, Any]) -> tuple[float, float]:
    """Return the wait time and the transfer time in seconds, summed over all axes."""
    return sum(row["wait_s"].values()), sum(row["transfer_s"].values())


def _print_strategies(rows: Sequence[dict[str, Any]]) -> None:
    one = rows[0]
    sizes = f"{one['ranks']} ranks, {one['layers']} layers, hidden size {one['hidden']}"
    print(f"\n5. Side by side: {sizes}, {one['tokens']:,} tokens per step")
    print("   time of the busiest stage [ms]; received by a rank [GB]; memory of a rank [GB]")
    print(
        "                   step = computation + exposed + idle  received   states  activations"
        "   peak"
    )
    for row in rows:
        times = [row[f"{key}_s"] * 1e3 for key in ("step", "computation", "communication", "idle")]
        memory = row["memory"]
        states = sum(memory[kind] for kind in _STATES)
        sizes = [row["received_bytes"], states, memory["activation"], memory["all"]]
        cells = "".join(f"{each:{width}.2f}" for each, width in zip(times, (11, 14, 10, 7)))
        cells += "".join(f"{each / 1e9:{width}.2f}" for each, width in zip(sizes, (10, 9, 13, 7)))
        print(f"   {row['strategy']:12s}{cells}")
