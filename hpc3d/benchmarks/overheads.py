"""Measure the overheads of hpc3d with pairs of alternating runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.benchmarks import harness
from hpc3d.config.load import load
from hpc3d.config.package_data import shipped
from hpc3d.config.resolve import resolve

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.config.input_file import Config

_HIDDEN_512 = ["--model.hidden", "512", "--model.layers", "4", "--train.batch", "128"]
_CUBOID = ["--mesh.x", "16", "--mesh.y", "4", "--mesh.z", "1"]
_OVERHEAD = {
    "hidden 512, 4 layers, 8,192 tokens, 4 x 4 x 4": _HIDDEN_512,
    "hidden 512, 4 layers, 8,192 tokens, 16 x 4 x 1": [*_HIDDEN_512, *_CUBOID],
    "gpt-3d-64.toml, 4 x 4 x 4": [],
}
_REPLICAS = ["--mesh.d", "2", "--parallel.bucket_mb", "1", "--train.batch", "32"]
_MPI = ["--mesh.transport", "mpi"]
_OVERLAP = {
    "2 replicas, MPI": [*_REPLICAS, *_MPI],
    "2 replicas, shared memory": _REPLICAS,
}
_TENSOR = ["--mesh.d", "1", "--mesh.x", "2", "--train.batch", "32", *_MPI, "--parallel.scheme"]
_IN_CHUNKS = ["--parallel.chunked_products", "2"]
_SWITCHES = {  # label -> (options of both runs, options of the run with overlap)
    "ZeRO 3, prefetch of weights": (
        [*_REPLICAS, *_MPI, "--parallel.zero", "3"],
        ["--parallel.prefetch", "true"],
    ),
    "1-D, products in 2 chunks": ([*_TENSOR, "1d"], _IN_CHUNKS),
    "1-D with sequence parallelism, products in 2 chunks": (
        [*_TENSOR, "1d-sequence"],
        _IN_CHUNKS,
    ),
}
_SCHEMES = ("gpt-1d-64", "gpt-2d-64", "gpt-2.5d-64", "gpt-3d-64")


def overhead(options: Namespace) -> dict[str, Any]:
    results = {}
    for label, sizes in _OVERHEAD.items():
        path = str(shipped("gpt-3d-64.toml"))
        found = results[label] = harness.overhead(path, sizes, 64, options.rounds or 3)
        print(f"{label}: 64 ranks {found['ours_s']:.2f} s per step, one rank {_pair(found)}")
        print(
            f"    time from the start of 64 ranks to the first step: {found['first_step_s']:.1f} s"
        )
        print("    CPU time in s per step, summed over ranks    64 ranks  one rank")
        ours, serial = found["processor"], found["processor_serial"]
        for name in sorted(ours, key=ours.get, reverse=True)[:12]:
            print(f"    {name:44s} {ours[name]:10.2f} {serial.get(name, 0):9.2f}")
    return results


def step(options: Namespace) -> dict[str, Any]:
    results = {}
    for label, config in _serial_configs().items():
        found = results[label] = harness.against_torch(config, options.rounds or 5)
        print(f"{label}: hpc3d {found['ours_s']:.2f} s per step, eager torch {_pair(found)}")
    return results


def trace(options: Namespace) -> dict[str, Any]:
    config = _serial_configs()["gpt-serial.toml"]
    small = harness.with_sizes(config, batch=24)
    found = harness.tracing(small, options.rounds or 20)
    share = found["events"] * found["event_us"] / (found["theirs_s"] * 1e6)
    print(f"with tracing {found['ours_s']:.3f} s per step, without tracing {_pair(found)}")
    print(
        f"{found['events']:.0f} events at {found['event_us']:.2f} us each: {share:.2%} of the "
        "step time"
    )
    return {**found, "share": share}


def overlap(options: Namespace) -> dict[str, Any]:
    results, path = {}, str(shipped("gpt-dp-vs-pp.toml"))
    for label, sizes in _OVERLAP.items():
        found = results[label] = harness.overlap(path, sizes, 2, options.rounds or 7)
        times = (
            f"{found['ours_s'] * 1e3:.1f} ms per step with overlap, {found['theirs_s'] * 1e3:.1f}"
        )
        print(
            f"{label}: exposed gradient reduction {times} ms without, {_ratio(found)}; "
            f"received bytes {found['bytes']}"
        )
    for label, (sizes, switch) in _SWITCHES.items():
        found = results[label] = harness.switched(path, sizes, 2, options.rounds or 7, switch)
        print(f"{label}: {found['ours_s']:.3f} s per step, without {_pair(found)}")
    return results


def schemes(options: Namespace) -> dict[str, Any]:
    folders = []
    for name in _SCHEMES:
        print(f"{name}: 20 steps on 64 ranks", flush=True)
        done = harness.run(64, [str(shipped(f"{name}.toml"))], options.out, steps=20)
        folders.append(str(done["folder"]))
    report = [sys.executable, "-m", "hpc3d.report", *folders]
    subprocess.run([*report, "--out", str(Path(options.out) / "schemes")], check=True)
    return {"runs": folders}


def _serial_configs() -> dict[str, Config]:
    """Return two configurations: gpt-serial.toml and a variant with hidden size 512."""
    config = resolve(load(shipped("gpt-serial.toml"), []), 1)
    wide = harness.with_sizes(config, hidden=512, layers=4, batch=128)
    return {"gpt-serial.toml": config, "hidden 512, 4 layers, 8,192 tokens": wide}


def _pair(found: Mapping[str, float]) -> str:
    """Format the baseline's step time in s, and the median and range of the step time ratio."""
    return f"{found['theirs_s']:.2f} s, {_ratio(found)}"


def _ratio(found: Mapping[str, float]) -> str:
    low, high = found["ratio_min"], found["ratio_max"]
    return f"ratio {found['ratio']:.3f} ({low:.3f} to {high:.3f})"
