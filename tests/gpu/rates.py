"""Rates of this GPU as a machine file for `plan` and `simulate`: matrix products, fused attention,
copies, and the time of a launch. All other values are those of a similar machine."""

import time
from ctypes import c_void_p
from dataclasses import replace
from datetime import date
from functools import partial
from typing import NamedTuple

import numpy as np

from hpc3d.ops.attention import HeadForm
from hpc3d.ops.product import product
from hpc3d.predict.calibration.calibrate import step_seconds
from hpc3d.predict.machine.machine import AttentionRates, Rates
from hpc3d.predict.machine.machine_file import dumps, load
from hpc3d.predict.simulation.simulator import simulate
from tests.gpu.benchmark import COPIED, GPT2, TINY, per_second
from tests.gpu.environment import the
from tests.gpu.graph import KERNELS, launch_seconds, timed
from tests.gpu.nccl import begun, call_seconds, skipped
from tests.gpu.notes import Skip
from tests.gpu.parts import MACHINE_FILE
from tests.gpu.trainers import config_of, trainer_of

SIMILAR = {"H200": "h200", "H100": "h100", "A100": "a100-selene", "V100": "v100-8x4"}
SIDES = 256, 512, 1024, 2048, 4096, 8192, 10240
WORK = 2.5e12  # FLOPs of the products between two looks at the clock
SUSTAINED = 2.0  # seconds after which a GPU has reached its power limit
TOKENS, COLUMNS = 16384, 2048  # of the attention, as in arXiv:2407.08608
SEQUENCES, WIDTHS = (512, 1024, 4096, 16384), (64, 128)
PROBES = 1e-3, 2e-3  # values of host_s at which the host limits a step
STEPS = 10


class Sizes(NamedTuple):
    """Sizes of the measured work; `told` is in the machine file."""

    kernels: int = KERNELS
    copied: int = COPIED
    sides: tuple[int, ...] = SIDES
    work: float = WORK
    sustained: float = SUSTAINED
    tokens: int = TOKENS
    columns: int = COLUMNS
    sequences: tuple[int, ...] = SEQUENCES
    model: dict = GPT2
    told: str = ""


SMALL = Sizes(
    *(20, 1 << 20, (16, 32), 0.0, 0.0, 256, 128, (128, 256), TINY),
    told=" with sizes that are too small for predictions",
)


def cases(device, quick):
    sizes = SMALL if quick or device.fake else Sizes()
    found = {}  # fields of the machine, once they are measured
    given = device, sizes, found
    yield "kernels", partial(kernels, *given)
    yield "copies", partial(copies, *given)
    for real in device.reals:
        yield f"products [{real}]", partial(products, *given, real)
    for width in WIDTHS:
        for causal in (True, False):
            words = "causal" if causal else "no mask"
            yield f"attention [{width}, {words}]", partial(attention, *given, width, causal)
    yield "calls", partial(calls, device, found)
    yield "host", partial(host, *given)
    yield MACHINE_FILE, partial(machine_file, *given)


def rounded(value):
    """Round to the precision of the measurements."""
    return float(f"{value:.4g}")


def kernels(device, sizes, found, notes):
    found["launch_s"] = rounded(launch_seconds(device.pool(), sizes.kernels)["launched"])
    notes.fact("launch_s", found["launch_s"])


def copies(device, sizes, found, notes):
    """Copies in device memory, read and written, and from pinned host memory."""
    if device.fake:
        raise Skip("a fake device copies in host memory")
    cuda, size = device.cupy.cuda, sizes.copied
    source, target = (device.memory(size) for _ in "st")
    pinned, stream = cuda.alloc_pinned_memory(size), cuda.get_current_stream()
    ways = {
        "memory_bandwidth": (target.copy_from_device_async, source, 2 * size),
        "host_bandwidth": (target.copy_from_host_async, c_void_p(pinned.ptr), size),
    }
    for name, (copy, origin, moved) in ways.items():
        rate = per_second(device, partial(copy, origin, size, stream), moved)
        found[name] = rounded(rate)
        notes.fact(name, found[name])


def products(device, sizes, found, real, notes):
    """Square products of different sizes in a CUDA graph; the largest one at the power limit."""
    pool, sides = device.pool(), sizes.sides
    some = np.random.default_rng(1).standard_normal((sides[-1], sides[0]), np.float32)
    whole = [pool.bring(np.tile(some, sides[-1] // sides[0]).astype(real)) for _ in "ab"]
    whole.append(pool.empty(whole[0].shape, np.dtype(real)))
    rates = []
    for side in sides:
        square = [each.reshape(-1)[: side * side].reshape(side, side) for each in whole]
        rates.append(rounded(product_rate(pool, square, sizes.work)))
    sustained = rounded(product_rate(pool, whole, sizes.work, sizes.sustained))
    flop = tuple(2.0 * side**3 for side in sides)
    found.setdefault("gemm", {})[real] = Rates(max(*rates, sustained), flop, (*rates,), sustained)
    notes.fact("FLOP/s", dict(zip(sides, rates, strict=True)))
    notes.fact("FLOP/s sustained", sustained)


def product_rate(pool, square, work, warm=0.0):
    """Return the FLOP/s of products, after `warm` seconds of them."""
    flop, graph, start = 2.0 * len(square[0]) ** 3, pool.graph(), time.perf_counter()
    count = int(min(1000, max(1, work / flop)))
    product(*square)
    graph.begin()
    for _ in range(count):
        product(*square)
    graph.end()
    times = [timed(pool, graph.launch) for _ in range(5)]
    while time.perf_counter() - start < warm:
        times = [timed(pool, graph.launch) for _ in range(5)]
    return count * flop / float(np.median(times))


def attention(device, sizes, found, width, causal, notes):
    """cuDNN's attention, forward and backward. A causal mask halves the FLOPs."""
    flash, real = device.flash(), device.reals[-1]
    if not flash.suits(real, width):
        raise Skip(f"cuDNN does not take {real} with heads of {width}")
    random, form, rates = np.random.default_rng(1), HeadForm(width), {False: [], True: []}
    qkv, dout = (
        device.upload(random.standard_normal((sizes.tokens, columns), np.float32).astype(real))
        for columns in (3 * sizes.columns, sizes.columns)
    )
    for sequence in sizes.sequences:
        out, stats = flash.forward(qkv, sequence, form, causal)
        ways = {
            False: lambda t=sequence: flash.forward(qkv, t, form, causal),
            True: lambda t=sequence, o=out, s=stats: flash.backward(
                dout, qkv, o, s, t, form, causal
            ),
        }
        flop = sizes.tokens * sizes.columns * sequence * (1 if causal else 2)
        for backward, function in ways.items():
            rate = per_second(device, function, (5 if backward else 2) * flop)
            rates[backward].append(rounded(rate))
    notes.fact("FLOP/s forward, backward", [*rates.values()])
    found["attention"] = (
        *found.get("attention", ()),
        *(
            AttentionRates(width, causal, backward, sizes.sequences, tuple(each))
            for backward, each in rates.items()
        ),
    )


def calls(device, found, notes):
    """The time of the host in a call of NCCL."""
    if device.fake:
        skipped(notes)
    found["dispatch_s"] = rounded(call_seconds(begun(device), device))
    notes.fact("dispatch_s", found["dispatch_s"])


def host(device, sizes, found, notes):
    """host_s, with which the predicted time of a step with few tokens is the measured one."""
    how = {**sizes.model, "batch": 1, "steps": STEPS, "dtype": device.reals[0]}
    trainer, times = trainer_of(device, **how), []
    for number in range(STEPS):
        device.synchronize()
        start = time.perf_counter()
        trainer.step(number)
        device.synchronize()
        times.append(time.perf_counter() - start)
    measured, config = float(np.median(times[2:])), config_of("cupy", **how)
    found["host_s"] = rounded(host_seconds(measured, config, similar_machine(device)[1]))
    notes.fact("ms a step", 1e3 * measured)
    notes.fact("host_s", found["host_s"])


def host_seconds(measured, config, machine):
    """Solve for host_s. The time of a step that the host limits is linear in it."""
    low, high = (
        step_seconds(simulate(config, config.model.vocabulary, replace(machine, host_s=each)))
        for each in PROBES
    )
    slope = (high - low) / (PROBES[1] - PROBES[0])
    return max(0.0, PROBES[0] + (measured - low) / slope)


def similar_machine(device):
    """Return the name of this GPU, and the shipped machine with the most similar one."""
    the("pydantic")
    name = device.cuda().name
    return name, load(next((SIMILAR[part] for part in SIMILAR if part in name), "h100"))


def machine_file(device, sizes, found, notes):
    """The text of the file is a fact, because only the parent knows where results belong."""
    name, base = similar_machine(device)
    measured = {**found, "gemm": {**base.gemm, **found.get("gemm", {})}}
    for real, rates in found.get("gemm", {}).items():
        peak = base.gemm[real].peak if real in base.gemm else 0.0
        measured["gemm"][real] = replace(rates, peak=max(peak, rates.peak))
    if not device.fake:
        measured["memory_gb"] = rounded(device.cupy.cuda.runtime.memGetInfo()[1] / 1e9)
    told = ", ".join(
        sorted({*measured} - {"gemm"} | {f"gemm.{real}" for real in found.get("gemm", ())})
    )
    source = f"make gpu-check on {date.today()}: {name}. Measured{sizes.told}: {told}"
    source += f"; all other values are those of the machine {base.name}"
    title = name.lower().replace(" ", "-")
    machine = replace(base, name=title, source=source, errors=(), **measured)
    notes.fact(MACHINE_FILE, dumps(machine))
