"""Predict the published speedups of 3-D over 1-D and 2-D tensor parallelism.

Z. Bian, Q. Xu, B. Wang, Y. You, "Maximizing Parallelism in Distributed Training for Huge Neural
Networks", arXiv:2105.14450, report that on 64 V100 GPUs, 3-D is 2.32 times as fast as 1-D and 1.57
times as fast as 2-D. The metric is the average step time, (forward + backward) / batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.config.cuboid import cuboids
from hpc3d.config.input_file import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from hpc3d.config.package_data import shipped
from hpc3d.config.resolve import resolve
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.trace.schema import STEPS

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.predict.machine.machine import Machine

V100 = "machines/v100-4x16.toml"
PAPER = {"1d": 2.32, "2d-summa": 1.57}  # published speedup of 3-D over each scheme
CLOSE = 0.10
RANKS = 64
_GRIDS = {"1d": (64, 1, 1), "2d-summa": (8, 8, 1), "3d": (4, 4, 4)}
_DTYPES = ("float32", "float16")
_HIDDEN = (2048, 4096, 6144, 8192, 12288, 16384)
_BATCH = (64, 128, 192, 256, 512)
# With 1-D tensor parallelism on 64 ranks, the number of heads must be a multiple of 64.
_BLOCKS = {"layers": 2, "heads": RANKS, "vocabulary": RANKS}

_UNTOLD = """\
The paper's abstract does not specify the node and network type, the data type, the
batch size, the hidden size, the sequence length, the number of heads, activation checkpointing, or
the broadcast algorithm.
Assumptions: nodes of 4 V100 with one EDR port each (inputs/machines/v100-4x16.toml); sequences of
512 tokens; 64 heads; the same batch size for all schemes; no activation checkpointing, but
re-gathering of gathered blocks in the backward pass (as in the first code of the authors,
hpcaitech/ColossalAI 404ecbdcc); the fastest broadcast algorithm of common libraries; a model of
two Transformer blocks (the cost of a vocabulary of 64 tokens is negligible); and, for layouts that
do not fit in memory (m), a GPU with more memory.  With the same batch size for all schemes, both
predicted speedups agree with the paper only if 1-D runs on such a GPU."""


class _Spent(NamedTuple):
    """Time of a layout's forward and backward passes in s, and peak memory per rank in bytes."""

    seconds: float
    peak: int


def _model_of(
    batch: int,
    hidden: int,
    dtype: str,
    sequence: int = 512,
    keep: bool = False,
    recompute: str = "none",
) -> Config:
    return Config(
        parallel=ParallelConfig(keep_gathered=keep, recompute=recompute),
        model=ModelConfig(hidden=hidden, sequence=sequence, **_BLOCKS),
        train=TrainConfig(batch=batch, dtype=dtype),
    )


def _spent(machine: Machine, config: Config, scheme: str, grid: tuple[int, ...]) -> _Spent:
    """Predict the time and memory of a scheme on a grid (x, y, z) of ranks.

    Raises ValueError if the model sizes are not divisible by the grid.
    """
    mesh = MeshConfig(**dict(zip("xyz", grid, strict=True)))
    config = replace(config, mesh=mesh, parallel=replace(config.parallel, scheme=scheme))
    (run,) = simulate(resolve(config, RANKS), _BLOCKS["vocabulary"], machine)
    step = dict(zip((column.name for column in STEPS), run.step, strict=True))
    return _Spent(step["forward_s"] + step["backward_s"], run.peak["all"])


def point(machine: Machine, batch: int, hidden: int, dtype: str, **how: Any) -> dict[str, Any]:
    """Compare the three schemes for one batch size and hidden size.

    For each scheme, the result contains the time per sequence in ms, whether the scheme fits in
    memory, and the speedup of 3-D over the scheme.
    """
    config = _model_of(batch, hidden, dtype, **how)
    each = {scheme: _spent(machine, config, scheme, grid) for scheme, grid in _GRIDS.items()}
    return {
        "dtype": dtype,
        "batch": batch,
        "hidden": hidden,
        "ms": {scheme: one.seconds / batch * 1e3 for scheme, one in each.items()},
        "speedup": {scheme: each[scheme].seconds / each["3d"].seconds for scheme in PAPER},
        "fits": {scheme: one.peak <= machine.memory_gb * 1e9 for scheme, one in each.items()},
    }


def rows(
    machine: Machine,
    dtype: str,
    hidden: Sequence[int] = _HIDDEN,
    batch: Sequence[int] = _BATCH,
    **how: Any,
) -> list[dict[str, Any]]:
    """Return the results of `point` for all combinations of hidden size and batch size."""
    return [point(machine, b, h, dtype, **how) for h, b in product(hidden, batch)]


def _close(scheme: str, speedup: float) -> bool:
    """Return True if a speedup over `scheme` is close to the published speedup.

    CLOSE is the maximum relative difference.
    """
    return abs(speedup / PAPER[scheme] - 1) <= CLOSE


def reproduces(row: dict[str, Any]) -> bool:
    return all(_close(scheme, row["speedup"][scheme]) for scheme in PAPER)


def own_batches(found: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Return sizes that reproduce the published speedups, with one batch size per scheme.

    Each result is (hidden size, batch size for 2-D, batch size for 3-D), and both layouts fit in
    memory. 1-D may use any batch size, because its time per sequence does not depend on it.
    """
    pairs = [
        (flat, cube)
        for flat, cube in product(found, found)
        if flat["hidden"] == cube["hidden"] and flat["fits"]["2d-summa"] and cube["fits"]["3d"]
    ]
    return [
        (flat["hidden"], flat["batch"], cube["batch"])
        for flat, cube in pairs
        if _close("1d", flat["ms"]["1d"] / cube["ms"]["3d"])
        and _close("2d-summa", flat["ms"]["2d-summa"] / cube["ms"]["3d"])
    ]


def planned(machine: Machine, row: dict[str, Any]) -> dict[str, Any]:
    """Return the fastest 3-D grid for the batch size and hidden size in `row`.

    `row` is a result of `point`. The returned dict contains the grid (x, y, z), the time per
    sequence in ms, and the speedup over the cubic grid.
    """
    timed, config = {}, _model_of(row["batch"], row["hidden"], row["dtype"])
    for grid in cuboids(RANKS):
        try:
            timed[grid] = _spent(machine, config, "3d", grid).seconds
        except ValueError:  # a model size is not divisible by the grid size
            continue
    grid = min(timed, key=timed.get)
    gain = timed[_GRIDS["3d"]] / timed[grid]
    return {"grid": grid, "ms": timed[grid] / row["batch"] * 1e3, "over_cube": gain}


def variants(machine: Machine) -> dict[str, tuple[Machine, dict[str, Any]]]:
    """Return alternative assumptions as a dict from name to (machine, arguments of `rows`)."""
    inside, outside = machine.links
    ports = inside, replace(outside, node_bandwidth=2 * outside.bandwidth)
    return {
        "two ports per node": (replace(machine, links=ports), {}),
        "sequences of 2,048": (machine, {"sequence": 2048}),
        "all recomputed": (machine, {"recompute": "full"}),
        "gathered blocks kept": (machine, {"keep": True}),
    }


def main(options: Namespace) -> dict[str, Any]:
    """Print and return the predicted speedups on a machine (default: 64 V100 GPUs)."""
    machine = load(options.machine or shipped(V100))
    found = {dtype: _sweep(machine, dtype) for dtype in _DTYPES}
    found["variants"] = [
        _vary(label, dtype, variant, options)
        for dtype, (label, (variant, options)) in product(_DTYPES, variants(machine).items())
    ]
    print(f"\n{_UNTOLD}")
    return found


def _sweep(machine: Machine, dtype: str) -> dict[str, Any]:
    found = rows(machine, dtype)
    print(
        f"\n{dtype}: speedup of 3-D (4 x 4 x 4) over 1-D (64; paper: 2.32) and 2-D (8 x 8; 1.57)"
    )
    print(
        "   a: speedup over 1-D within 10 % of the paper; b: over 2-D; *: both; m: out of memory"
    )
    _print_table(found, _cell)
    alone = own_batches(found)
    print("   Batch sizes for which both speedups are within 10 % of the paper:")
    print(f"   (hidden, 2-D batch, 3-D batch) {', '.join(map(str, alone)) or 'none'}")
    plans = [planned(machine, row) for row in found]
    print("\n   Fastest 3-D mesh (x, y, z), and its speedup over the cubic mesh (4 x 4 x 4)")
    _print_table([row | plan for row, plan in zip(found, plans, strict=True)], _plan_cell)
    return {"rows": found, "own_batches": alone, "planned": plans}


def _vary(label: str, dtype: str, machine: Machine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Print and return the sizes that reproduce both speedups under alternative assumptions."""
    found = rows(machine, dtype, **options)
    both = [(row["hidden"], row["batch"]) for row in found if reproduces(row)]
    print(f"   {dtype}, {label}: both speedups within 10 % at (hidden, batch) {both or 'none'}")
    return {"dtype": dtype, "label": label, "both": both}


def _print_table(found: Sequence[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> None:
    batches = sorted({row["batch"] for row in found})
    print(" " * 10 + "".join(f"{f'batch {batch}':>15s}" for batch in batches))
    for hidden in sorted({row["hidden"] for row in found}):
        cells = (text(row) for row in found if row["hidden"] == hidden)
        print(f"   {hidden:6d} " + "".join(f"{each:>15s}" for each in cells))


def _cell(row: dict[str, Any]) -> str:
    over = row["speedup"]
    holds = "".join(mark for mark, scheme in zip("ab", PAPER) if _close(scheme, over[scheme]))
    marks = {"ab": "*", "": " "}.get(holds, holds) + (" " if all(row["fits"].values()) else "m")
    return f"{over['1d']:.2f} {over['2d-summa']:.2f} {marks}"


def _plan_cell(row: dict[str, Any]) -> str:
    return f"{'x'.join(map(str, row['grid']))} {row['over_cube']:.2f}"
