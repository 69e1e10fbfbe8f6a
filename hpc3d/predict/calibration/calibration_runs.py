"""Runs to calibrate a machine model (CALIBRATE), and others to verify it (CHECK, FINDINGS).

Each line sets mesh sizes (1 by default) and other keys of an input file, without section names.
"""

from __future__ import annotations

from math import prod

from hpc3d.config.input_file import Config
from hpc3d.predict.simulation.simulator import load_resolved

_SECTION = {
    **dict.fromkeys(("p", "d", "x", "y", "z", "transport"), "mesh"),
    **dict.fromkeys(("scheme", "zero", "microbatches", "schedule"), "parallel"),
    **dict.fromkeys(("layers_per_stage", "bucket_mb"), "parallel"),
    **dict.fromkeys(("layers", "hidden", "heads"), "model"),
    **dict.fromkeys(("batch",), "train"),
    **dict.fromkeys(("clock",), "trace"),
}
_BASE = "x=1 y=1 z=1 layers=2 heads=16"

_SIZES = ("hidden=128 batch=16", "hidden=384 batch=32")
_LAYOUTS = """
x=1
x=2
d=2
p=2 microbatches=4
x=4
x=2 y=2
x=4 y=2 scheme=2d-summa
x=8 scheme=2d-summa
x=4 scheme=1d
d=4 zero=1
x=2 y=2 z=2
x=8
x=8 scheme=1d
d=8
p=2 d=4 microbatches=2
""".strip().splitlines()
CALIBRATE = [f"{layout} {size}" for size in _SIZES for layout in _LAYOUTS]

CHECK = """
x=1 hidden=256 layers=3 batch=24
x=1 hidden=192 batch=36 microbatches=3
x=1 y=2 hidden=256 batch=32
x=2 scheme=1d hidden=320 batch=24
d=2 hidden=256 layers=3 batch=24 zero=2 microbatches=2
p=2 hidden=256 layers=4 batch=32 microbatches=8
p=2 hidden=192 layers=4 batch=36 microbatches=6 schedule=zb-h1
x=2 z=2 hidden=256 layers=3 batch=32
p=4 hidden=256 layers=4 batch=32 microbatches=8 schedule=gpipe
x=2 y=2 z=2 hidden=256 batch=48 layers=3
x=2 y=2 z=2 scheme=2.5d hidden=320 batch=32
p=2 x=2 y=2 hidden=256 layers=4 batch=32 microbatches=4
""".strip().splitlines()

# Small layouts that show each finding of arXiv:2407.02081 (`bench findings --measure`).
FINDINGS = {
    "1. Pipeline and data parallelism, for few and for many tokens": (
        "p=2 hidden=512 batch=4 microbatches=4",
        "d=2 hidden=512 batch=4",
        "p=2 hidden=128 batch=64 microbatches=8",
        "d=2 hidden=128 batch=64",
    ),
    "2. Memory of all ranks, for even and for uneven stages": (
        "layers=4 hidden=256 batch=16 microbatches=8",
        "p=2 layers=4 hidden=256 batch=16 microbatches=8",
        "p=2 layers=4 hidden=256 batch=16 microbatches=8 layers_per_stage=[3,1]",
    ),
    "3. Message size: gradient buckets, and microbatches with tensor parallelism": (
        "d=2 hidden=384 batch=8 bucket_mb=0.01",
        "d=2 hidden=384 batch=8 bucket_mb=25",
        "x=2 scheme=1d hidden=128 batch=32 microbatches=16",
        "x=2 scheme=1d hidden=128 batch=32",
    ),
    "4. Wait times: even and uneven stages": (
        "p=2 layers=4 hidden=384 batch=32 microbatches=8",
        "p=2 layers=4 hidden=384 batch=32 microbatches=8 layers_per_stage=[3,1]",
    ),
    "5. Side by side": (
        "d=2 hidden=256 batch=16",
        "d=2 hidden=256 batch=16 zero=1",
        "d=2 hidden=256 batch=16 zero=2",
        "d=2 hidden=256 batch=16 zero=3",
        "p=2 hidden=256 batch=16 microbatches=8",
        "x=2 hidden=256 batch=16 scheme=1d",
        "x=2 hidden=256 batch=16 scheme=1d-sequence",
    ),
}


def settings(line: str, **more: str) -> tuple[int, list[str]]:
    """Parse a line of CALIBRATE or CHECK; return the number of ranks and command-line options.

    The keyword arguments `more` override settings in the line.
    """
    pairs = dict(pair.split("=") for pair in f"{_BASE} {line}".split()) | more
    ranks = prod(int(pairs.get(axis, 1)) for axis in ("p", "d", "x", "y", "z"))
    options = ([f"--{_SECTION[key]}.{key}", value] for key, value in pairs.items())
    return ranks, [word for option in options for word in option]


def config_of(line: str, **more: str) -> Config:
    """Return the resolved Config for a line of CALIBRATE or CHECK; `more` overrides settings."""
    ranks, words = settings(line, **more)
    return load_resolved(None, words, ranks)
