"""Speed of training steps of GPT-2 with 124 M and 1.3 B parameters in bfloat16, alternately with
hpc3d and torch in one process, compared with the measured rates of products and copies; times of
the kernels of a step, and the number of launches per layer."""

import gc
import json
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from hpc3d.ops import routing
from hpc3d.ops.float8 import E4M3, Coded, encode
from hpc3d.ops.routing import SlotForm
from tests.gpu.layers import torch_or_skip
from tests.gpu.notes import Skip
from tests.gpu.trainers import Noise, trainer_of

GPT2 = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "vocabulary": 50304}
LARGE = {"layers": 24, "hidden": 2048, "heads": 16, "sequence": 1024, "vocabulary": 50304}
TINY = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocabulary": 128}
TRAIN = {"steps": 10_000, "learning_rate": 6e-4, "warmup": 100}
# Sizes, steps of a block, and the bytes that ours and torch's want together by sequences a batch.
MODELS = {
    "GPT-2 124 M": (GPT2, 10, {32: 90e9, 16: 50e9}),
    "1.3 B": (LARGE, 4, {8: 120e9, 4: 75e9}),
}
WARM, ROUNDS = 4, 5
SIDE = 8192  # of square matrices
COPIED = 4 << 30  # bytes
# Tokens, sequences of them, columns, experts, choices: of a layer as Mixtral's, and of a fine one.
MIXTURES = ((1024, 32, 4096, 8, 2), (1024, 32, 2048, 64, 6))
TINY_MIXTURES = ((16, 2, 32, 4, 2),)


def cases(device, quick):
    measured = {}  # the rate of products, once it is known
    if quick or device.fake:
        sequence = 16 if device.fake else 128  # of which cuDNN's graphs want multiples
        models = {"tiny": ({**TINY, "sequence": sequence}, 1, {2: 0.0})}
        mixtures = TINY_MIXTURES
    else:
        models, mixtures = MODELS, MIXTURES
        yield "rates", partial(rates, device, measured)
    for form in mixtures:
        yield f"routing, {form[4]} of {form[3]} experts", partial(routed, device, form)
    for name, (sizes, block, wanted) in models.items():
        batch = fitting(device, wanted)
        given = device, measured, name, {**TRAIN, **sizes, "batch": batch}, block
        yield f"{name}, ours", partial(ours, *given)
        if name != "1.3 B":
            yield f"{name}, kernels", partial(kernels, device, given[3])
            yield "launches a layer", partial(launches_a_layer, device)
        how = "parts" if name == "1.3 B" else "whole"
        yield f"{name} against torch.compile ({how})", partial(against, *given, how)
        yield f"{name} against torch, eager", partial(against, *given, "")


def real_of(device):
    return "bfloat16" if "bfloat16" in device.reals and not device.fake else device.reals[0]


def rates(device, measured, notes):
    """Time products of 8,192^3 by hpc3d and by torch, and a copy in device memory."""
    random, lt = np.random.default_rng(1), device.lt()
    real = np.dtype(real_of(device))
    a, b = (
        device.upload(random.standard_normal((SIDE, SIDE), np.float32).astype(real))
        for _ in range(2)
    )
    out, flops = device.cupy.empty((SIDE, SIDE), real), 2 * SIDE**3
    rate = per_second(device, lambda: lt.product(a, b, out), flops)
    notes.fact(f"TFLOP/s, cuBLASLt, {real.name}", rate / 1e12)
    measured["rate"] = rate
    if real.name == "bfloat16" and int(device.cupy.cuda.Device().compute_capability) >= 89:
        rate = per_second(device, float8_product(device, lt, out), flops)
        notes.fact("TFLOP/s, cuBLASLt, float8", rate / 1e12)
    source = device.cupy.empty(COPIED, np.uint8)
    target = device.cupy.empty(COPIED, np.uint8)
    stream = device.cupy.cuda.get_current_stream()
    copied = per_second(
        device, lambda: target.data.copy_from_device_async(source.data, COPIED, stream), 2 * COPIED
    )
    notes.fact("TB/s, read and written by a copy", copied / 1e12)
    torch = torch_on(device)
    x, y = (torch.randn(SIDE, SIDE, device="cuda", dtype=getattr(torch, real.name)) for _ in "xy")
    events = [torch.cuda.Event(enable_timing=True) for _ in "ab"]
    times = []
    for _ in range(12):
        events[0].record()
        x @ y
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e-3)
    notes.fact(f"TFLOP/s, torch, {real.name}", flops / float(np.median(times[2:])) / 1e12)


def float8_product(device, lt, out):
    """Time a product of two e4m3 matrices."""
    some = np.random.default_rng(2).standard_normal((SIDE, 128), np.float32)
    codes = np.tile(encode(some, E4M3).view(np.uint8), SIDE // 128)
    scale = device.upload(np.ones(1, np.float32))
    a, b = (Coded(device.upload(codes), scale, E4M3, out.dtype) for _ in "ab")
    return lambda: lt.coded_product(a, b.T, out)


def routed(device, form, notes):
    """Time dispatch and combine with capacity 1.25, as bytes read and written once per second, and
    the routing itself, which moves few bytes."""
    tokens, sequences, columns, count, top_k = form
    pool, random, real = device.pool(), np.random.default_rng(1), np.dtype(real_of(device))
    rows, capacity = tokens * sequences, -(-5 * tokens * top_k // (4 * count))

    def array(*shape):
        return pool.bring(random.standard_normal(shape, np.float32).astype(real))

    slots = SlotForm(tokens, count, capacity, 1, sequences * capacity)
    held = count * slots.rows
    x, y, logits = array(rows, columns), array(held, columns), array(rows, count)
    to, back = (pool.empty((n, columns), real) for n in (held, rows))
    routes = routing.route(logits, top_k)
    where = routing.slots_of(routes.experts, slots)
    kept = int((device.download(where) >= 0).sum())
    choices = rows * top_k
    row, numbers = columns * real.itemsize, 8 * choices
    ways = {
        "route": (
            lambda: routing.route(logits, top_k),
            logits.nbytes + 4 * logits.size + 12 * choices,
        ),
        "slots_of": (lambda: routing.slots_of(routes.experts, slots), 2 * numbers),
        "dispatch": (lambda: routing.dispatch(x, where, to), (rows + held) * row),
        "dispatch_grad": (lambda: routing.dispatch_grad(y, where, back), (rows + kept) * row),
        "combine": (lambda: routing.combine(y, where, routes.weights, back), (rows + kept) * row),
        "combine_grad": (
            lambda: routing.combine_grad(x, y, where, routes.weights, to),
            (rows + kept + held) * row,
        ),
    }
    for name, (function, moved) in ways.items():
        function()
        seconds = device.seconds(function, 10)
        notes.fact(name, f"{1e6 * seconds:.1f} us, {moved / seconds / 1e9:.1f} GB/s")
    notes.fact("choices that have a slot", kept / choices)


def per_second(device, function, amount):
    function()
    return amount / device.seconds(function, 10)


def flops_of(shape):
    """Return the FLOPs of a step by arXiv:2204.02311, appendix B: 6 per weight of a product and
    token, plus 12 T h per layer and token for attention."""
    weights = 12 * shape["layers"] * shape["hidden"] ** 2 + shape["vocabulary"] * shape["hidden"]
    attention = 12 * shape["layers"] * shape["hidden"] * shape["sequence"]
    return (6 * weights + attention) * shape["batch"] * shape["sequence"]


def ours_of(device, name, how):
    """Return functions that run a step without and with a graph, or only with a graph, if both do
    not fit in memory."""
    ways = {"eager": {}, "graph": {"cuda_graph": True}}
    if not device.fake:
        ways["graph, GELU in products"] = {"cuda_graph": True, "fused_gelu": True}
    if name == "1.3 B":
        ways = {"graph": ways["graph"]}
    return {way: stepping(device, {**how, **more}) for way, more in ways.items()}


def stepping(device, how):
    trainer = trainer_of(device, dtype=real_of(device), **how)
    numbers = iter(range(how["steps"]))
    return lambda: trainer.step(next(numbers)).loss


def theirs_of(device, how, compiled):
    from tests.gpu.peer import Peer
    from tests.gpu.trainers import config_of

    torch = torch_on(device)
    config = config_of("cupy", dtype=real_of(device), **how)
    names = "layers", "hidden", "heads", "sequence", "vocabulary"
    sizes = [how[name] for name in names]
    dtype = getattr(torch, real_of(device))
    peer, noise = Peer(device.where, dtype, config.train, sizes, compiled), Noise(config)
    numbers = iter(range(how["steps"]))
    return lambda: peer.step(noise.batch(next(numbers)))


def in_turn(device, ways, block, notes):
    """Run blocks of steps alternately; return the median seconds per step, and all blocks."""
    for name, step in ways.items():
        start = time.perf_counter()
        found = [step() for _ in range(WARM)]
        seconds = time.perf_counter() - start
        notes.fact(f"{name}: first losses, seconds of {WARM} steps", [found, round(seconds, 2)])
    times = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, step in ways.items():
            device.synchronize()
            start = time.perf_counter()
            for _ in range(block):
                step()
            device.synchronize()
            times[name].append((time.perf_counter() - start) / block)
    notes.fact("ms a step, by blocks", {n: [round(1e3 * t, 2) for t in times[n]] for n in times})
    return {name: float(np.median(each)) for name, each in times.items()}


def tell(notes, how, seconds, measured):
    """Report the speed, and the FLOP rate of the model divided by that of products."""
    tokens = how["batch"] * how["sequence"]
    notes.fact("tokens a step", tokens)
    for name, each in seconds.items():
        rate = flops_of(how) / each
        speed = f"{tokens / each:.0f} tokens/s, {rate / 1e12:.1f} TFLOP/s of the model"
        used = f", {100 * rate / measured['rate']:.1f} %" if "rate" in measured else ""
        notes.fact(name, f"{1e3 * each:.2f} ms, {speed}{used}")


def fitting(device, wanted):
    """Return the largest number of sequences per batch that fits in memory, or None."""
    total = 0.0 if device.fake else device.cupy.cuda.runtime.memGetInfo()[1]
    return next((batch for batch, nbytes in wanted.items() if nbytes <= total), None)


def fits(how):
    if how["batch"] is None:
        raise Skip("too little memory for ours and torch's together")


def released(function):
    """Call `function`, then release all unused memory to the device."""

    def run(device, *given):
        try:
            return function(device, *given)
        finally:
            gc.collect()
            if not device.fake:
                device.synchronize()
                device.cupy.get_default_memory_pool().free_all_blocks()
                empty_cache()

    return run


def empty_cache():
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@released
def ours(device, measured, name, how, block, notes):
    fits(how)
    seconds = in_turn(device, ours_of(device, name, how), block, notes)
    tell(notes, how, seconds, measured)
    if not device.fake:
        pool = device.cupy.get_default_memory_pool()
        notes.fact("GB that CuPy's pool holds", pool.total_bytes() / 1e9)


@released
def against(device, measured, name, how, block, compiled, notes):
    """The goal is at most the time of torch.compile."""
    fits(how)
    if device.fake and compiled:
        raise Skip("a fake device compiles nothing")
    theirs = theirs_of(device, how, compiled)
    ways = {**ours_of(device, name, how), "torch.compile" if compiled else "torch, eager": theirs}
    seconds = in_turn(device, ways, block, notes)
    tell(notes, how, seconds, measured)
    *mine, other = seconds.values()
    notes.fact("our time / torch's", round(min(mine) / other, 4))


@released
def kernels(device, how, notes):
    """Report the time and calls of every kernel of a step, traced by CUPTI."""
    no_fake(device)
    fits(how)
    count = 3
    found = traced(device, stepping(device, how), count)
    total = sum(seconds for seconds, _ in found.values())
    notes.fact("ms in kernels a step", 1e3 * total / count)
    notes.fact("kernels a step", sum(calls for _, calls in found.values()) / count)
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    for place, (name, (seconds, calls)) in enumerate(ordered[:40]):
        share = f"{100 * seconds / total:5.1f} %, {1e3 * seconds / count:.3f} ms"
        notes.fact(f"kernel {place:2d}", f"{share}, {calls / count:g} calls: {name[:60]}")


def no_fake(device):
    if device.fake:
        raise Skip("a fake device has no kernels")


def torch_on(device):
    """Return torch if it finds the device."""
    torch = torch_or_skip()
    if not device.fake and not torch.cuda.is_available():
        raise Skip("torch finds no device")
    return torch


def traced(device, step, count):
    """Return {name: (seconds, calls)} of all device work in `count` steps."""
    torch = torch_on(device)
    for _ in range(WARM):
        step()
    device.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            step()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    seconds, calls = Counter(), Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            seconds[event["name"]] += event["dur"] * 1e-6
            calls[event["name"]] += 1
    return {name: (seconds[name], calls[name]) for name in calls}


@released
def launches_a_layer(device, notes):
    """Count the launches of two additional layers; the goal is 25 per layer and step."""
    no_fake(device)
    sizes, counts = {**TRAIN, **GPT2, "batch": 2, "vocabulary": 1024}, []
    for layers in (2, 4):
        found = traced(device, stepping(device, {**sizes, "layers": layers}), 2)
        counts.append(sum(calls for _, calls in found.values()) / 2)
    notes.fact("launches a layer", (counts[1] - counts[0]) / 2)
    notes.fact("launches beside the layers", 2 * counts[0] - counts[1])
