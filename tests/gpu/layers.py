"""A whole GPT-2, compared with torch on the same device if possible: loss and all gradients.

The reference is torch in float64. In 16 bits, the tolerance is torch's own error in that type.
"""

from functools import partial

import numpy as np

from hpc3d.arrays.pool import from_host
from tests.gpu.notes import Skip
from tests.gpu.trainers import Noise, Watching, host, trainer_of, values_of

SIZES = {
    "two layers": {"layers": 2, "hidden": 256, "heads": 4, "sequence": 128, "batch": 8},
    "odd sizes": {"layers": 2, "hidden": 120, "heads": 5, "sequence": 37, "batch": 3},
}
QUICK = {"tiny": {"layers": 2, "hidden": 24, "heads": 3, "sequence": 9, "batch": 3}}
MORE = {
    "": {},
    ", not tied": {"tied": False},
    ", exact GELU": {"gelu": "exact"},
    ", recomputed": {"recompute": "full"},
    ", 3 microbatches": {"microbatches": 3, "batch": 6},
    ", GELU in products": {"fused_gelu": True},
}
VOCABULARY = 509
WIDER = 8  # the usual weights hardly disturb the identity
EXACT = 3e-5  # relative, of float32
LEAST, TIMES = 1.5e-2, 2.5  # of 16 bits: an error that is good enough, and of torch's own


def cases(device, quick):
    for name, sizes in (QUICK if quick else SIZES).items():
        for real in device.reals:
            if real == "float16":  # gradients are scaled by a factor
                continue
            for words, more in list(MORE.items())[: 2 if quick else None]:
                run = partial(against_torch, device, real, {**sizes, **more})
                yield f"{name}{words} [{real}]", run


def against_torch(device, real, how, notes):
    torch = torch_or_skip()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = trainer_of(device, Watching, vocabulary=VOCABULARY, dtype=real, steps=2, **how)
    for item in trainer.parameters:
        if item.std:
            from_host(item.value, (host(item.value) * WIDER).astype(item.value.dtype))
    weights, batch = values_of(trainer), Noise(trainer.config).batch(0)
    step = trainer.step(0)
    given = torch, where, weights, trainer.shape, batch
    loss, exact = gradients(*given, torch.float64)
    rounded, theirs = gradients(*given, getattr(torch, real))
    notes.fact("loss ours, theirs, exact", [step.loss, rounded, loss])
    error = abs(step.loss / loss - 1)
    bound = EXACT if real == "float32" else LEAST / 4
    notes.check("loss", error <= bound, error=error, bound=bound)
    for name, gradient in exact.items():
        check(notes, real, name, trainer.gradients[name], gradient, theirs[name])


def torch_or_skip():
    try:
        import torch
    except ImportError as error:
        raise Skip(f"no torch: {error}") from None
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def gradients(torch, where, weights, shape, batch, dtype):
    """Return the mean loss and {name: gradient} of torch's model, as float64 on the host."""
    from hpc3d.benchmarks import torch_reference

    def leaf(array):
        return torch.tensor(array).to(where, dtype).requires_grad_()

    leaves = {name: leaf(array) for name, array in weights.items()}
    tokens, targets = (torch.tensor(each).long().to(where) for each in batch)
    loss = torch_reference.loss(leaves, shape, tokens, targets)
    loss.backward()
    found = {name: each.grad.double().cpu().numpy() for name, each in leaves.items()}
    return loss.item(), found


def check(notes, real, name, ours, exact, theirs):
    """Compare the norm of the difference with that of the gradient."""
    size = np.linalg.norm(exact) or 1.0
    error, usual = (np.linalg.norm(each - exact) / size for each in (ours, theirs))
    bound = EXACT if real == "float32" else max(LEAST, TIMES * usual)
    worst = np.unravel_index(np.argmax(np.abs(ours - exact)), exact.shape)
    notes.check(
        f"gradient of {name}",
        error <= bound,
        error=error,
        torch_error=usual,
        bound=bound,
        norm=size,
        shape=exact.shape,
        worst={"at": worst, "got": ours[worst], "expected": exact[worst]},
    )
