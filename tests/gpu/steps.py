"""Training steps on the device, compared with NumPy; 16-bit steps, compared with float32."""

import time
from functools import partial
from pathlib import Path

import numpy as np

from tests.gpu.trainers import BIAS, MIXTRAL, SWITCH, trainer_of, values_of

ROOT = Path(__file__).parents[2]
SMALL = {"layers": 2, "hidden": 96, "heads": 4, "sequence": 48, "batch": 8, "vocabulary": 256}
EVERYTHING = "optimizer", "activations", "parameters"
WAYS = {
    "": {},
    " with dropout": {"dropout": 0.1},
    " in 2 microbatches": {"microbatches": 2},
    " with everything recomputed": {"recompute": "full", "dropout": 0.1},
    " with SGD": {"optimizer": "sgd", "learning_rate": 0.1},
    " without clipping": {"clip": 0.0},
    " by Lion": {"optimizer": "lion", "learning_rate": 1e-4},
    " by Adafactor": {"optimizer": "adafactor"},
    " by AdamW in 8 bits": {"optimizer": "adamw-8bit", "hidden": 256, "sequence": 256},
    " by Muon": {"optimizer": "muon"},
    " with activations kept in bfloat16": {"keep_dtype": "bfloat16"},
    " with activations kept in int8": {"keep_dtype": "int8"},
    " with activations kept in float8": {"keep_dtype": "float8"},
    " with everything offloaded": {"offload": EVERYTHING, "microbatches": 2},
    " with operands in float8, by block": {"product_dtype": "float8"},
    " with a mixture, top 1": {**SWITCH, **BIAS},
    " with a mixture, top 2": MIXTRAL,
}
STEPS = 10
CLOSE = 1e-4
NUDGE = 1e-6  # of weights, about what sums in float32 differ by
SPREADS = 4  # of two runs on NumPy, where rounding to few bits carries small differences far
LONG = {
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "sequence": 128,
    "batch": 32,
    "vocabulary": 256,
    "learning_rate": 1e-3,
    "warmup": 20,
}
SHORT = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float8 by block": {"dtype": "bfloat16", "product_dtype": "float8"},
    "float8 by tensor": {
        "dtype": "bfloat16",
        "product_dtype": "float8",
        "product_scale": "tensor",
    },
}
WITHIN = {"float16": 0.01, "bfloat16": 0.01, "float8 by block": 0.02, "float8 by tensor": 0.02}
TINY = {"layers": 1, "hidden": 16, "heads": 2, "sequence": 8, "batch": 4}  # on a fake device


def cases(device, quick):
    small, long = ({**SMALL, **TINY}, {**LONG, **TINY}) if device.fake else (SMALL, LONG)
    quick_ways = [*list(WAYS.items())[:2], *list(WAYS.items())[-2:]]
    for words, how in quick_ways if quick else WAYS.items():
        yield f"{STEPS} steps{words} as on NumPy", partial(as_on_numpy, device, {**small, **how})
    count = 10 if quick else 200
    yield f"{count} steps by type", partial(by_type, device, count, long)


def as_on_numpy(device, how, notes):
    """Compare losses, gradient norms and final weights in float32."""
    ours, theirs = (trainer_of(on, dtype="float32", steps=STEPS, **how) for on in (device, None))
    first, other = values_of(ours), values_of(theirs)
    for name, value in other.items():
        notes.same(f"initial {name}", first[name], value, 1e-6, 1e-8)
    (mine, last), (right, learnt_there) = made(ours), made(theirs)
    close, close_weights = bounds(how, right, learnt_there)
    notes.fact("bounds of norms and of weights", [close, close_weights])
    for number, (got, expected) in enumerate(zip(mine, right)):
        notes.same(f"loss and norm of step {number}", got, expected, close)
    for name, value in learnt_there.items():
        notes.near(f"final {name}", last[name], value, close_weights)


def made(trainer):
    """Return losses and norms [steps, 2] of all steps, and the final weights."""
    steps = [trainer.step(number) for number in range(STEPS)]
    found = np.array([(step.loss, step.grad_norm) for step in steps])
    return found, learnt(values_of(trainer))


def bounds(how, right, weights):
    """Return the bounds of losses and norms, and of weights. With few bits, they are NumPy's
    difference from full precision, or from other initial weights, because a device saves other
    rows of norms and has another order of sums."""
    if not how.keys() & {"keep_dtype", "product_dtype"} and how.get("optimizer") != "adafactor":
        return CLOSE, 30 * CLOSE
    other = trainer_of(None, dtype="float32", steps=STEPS, **{**how, "keep_dtype": None})
    if "keep_dtype" not in how:
        for item, draw in zip(other.parameters, np.random.default_rng(7).spawn(1000)):
            item.value *= 1 + NUDGE * draw.standard_normal(item.value.shape, np.float32)
    found, there = made(other)
    spread = np.abs(found / right - 1).max()
    far = max(distance(there[name], value) for name, value in weights.items())
    return max(CLOSE, SPREADS * spread), max(30 * CLOSE, SPREADS * far)


def distance(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def by_type(device, count, how, notes):
    """Train on the shipped text: losses within 1 % of float32 in 16 bits, and 2 % in 8 bits."""
    whole = losses(device, "float32", count, {**how, "dtype": "float32"}, notes)
    notes.fact("losses in float32", whole[:: max(1, count // 20)])
    for name, change in SHORT.items():
        if change["dtype"] not in device.reals or (device.fake and "tensor" in name):
            continue
        try:
            found = losses(device, name, count, {**how, **change}, notes)
        except Exception as error:
            notes.check(f"{name} runs", False, error=f"{type(error).__name__}: {error}")
            continue
        means, right = smooth(found), smooth(whole)
        worst = float(np.abs(means / right - 1).max())
        last = float(abs(means[-1] / right[-1] - 1))
        notes.fact(f"{name}: last losses, worst and last difference", [found[-3:], worst, last])
        notes.check(f"{name} at the end", last <= WITHIN[name], error=last)
        notes.check(f"{name} on the way", worst <= WITHIN[name], error=worst)


def losses(device, name, count, how, notes):
    from hpc3d.data.batches import Batches
    from hpc3d.data.token_file import open_tokens

    sizes = how["sequence"], how["batch"]
    batches = Batches(open_tokens(ROOT / "inputs" / "corpus"), *sizes, seed=1)
    trainer = trainer_of(device, batches=batches, steps=count, **how)
    start = time.perf_counter()
    found = [trainer.step(number).loss for number in range(count)]
    notes.fact(f"{name}: seconds a step", (time.perf_counter() - start) / count)
    return found


def learnt(values):
    """Omit the biases of q, k and v: the gradient of a key's bias is 0 up to rounding, so AdamW's
    steps are noise."""
    return {name: value for name, value in values.items() if "qkv.bias" not in name}


def smooth(found):
    """Return means over 10 steps."""
    return np.mean(np.reshape(found, (-1, 10)), 1)
