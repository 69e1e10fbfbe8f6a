"""The same model in torch, eager: what our gradients and our step time are compared with.

It follows hpc3d.model in sizes, names and the order of columns, [q | k | v] of a head, unless
these have a weight each, and (gate, up) of a feature, and is otherwise plain torch: linear,
layer_norm, rms_norm, gelu, silu, scaled_dot_product_attention, cross_entropy.  What a model has is
told by its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from hpc3d.ops.cross_entropy import IGNORE

if TYPE_CHECKING:
    from hpc3d.config.input_file import TrainConfig
    from hpc3d.model.parameters import Parameters


def linear(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weights[f"{name}.weight"].T, weights.get(f"{name}.bias"))


def norm(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, epsilon: float = 1e-5
) -> torch.Tensor:
    gamma, beta = weights[f"{name}.gamma"], weights.get(f"{name}.beta")
    if beta is None:
        return functional.rms_norm(x, gamma.shape, gamma, epsilon)
    return functional.layer_norm(x, gamma.shape, gamma, beta, epsilon)


def _projected(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, shape: Any
) -> list[torch.Tensor]:
    """q, k and v [B, heads, T, D] of x."""
    if f"{name}.qkv.weight" in weights:
        qkv = linear(weights, f"{name}.qkv", x).unflatten(-1, (shape.heads, 3, -1))
        return [part.transpose(1, 2) for part in qkv.unbind(3)]
    width = shape.hidden // shape.heads
    parts = (linear(weights, f"{name}.{letter}", x) for letter in "qkv")
    return [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Any, rotary: bool
) -> torch.Tensor:
    """Causal attention, [B, T, hidden]; neighbouring queries share a key."""
    if rotary:
        q, k = (_turned(each, shape.rotation) for each in (q, k))
    g = shape.heads // shape.kv_heads
    k, v = (each.repeat_interleave(g, 1) for each in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _turned(x: torch.Tensor, rotation: Any) -> torch.Tensor:
    """[..., T, D] by complex numbers: the pair (a, b) of features i and i + D / 2 is a + ib, a
    turn is a product with exp(i angle)."""
    sequence, width = x.shape[-2:]
    frequencies = torch.tensor(rotation.frequencies(width), dtype=x.dtype)
    angles = torch.outer(torch.arange(sequence, dtype=x.dtype), frequencies)
    a, b = x.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def _block(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, shape: Any
) -> torch.Tensor:
    rotary = "embedding.position" not in weights
    n = norm(weights, f"{name}.norm1", x, shape.epsilon)
    a = _attention(*_projected(weights, name, n, shape), shape, rotary)
    x = x + linear(weights, f"{name}.proj", a)
    h = linear(weights, f"{name}.up", norm(weights, f"{name}.norm2", x, shape.epsilon))
    if h.shape[-1] == 2 * shape.ffn:
        h = functional.silu(h[..., ::2]) * h[..., 1::2]
    else:
        h = functional.gelu(h, approximate="tanh" if shape.gelu == "tanh" else "none")
    return x + linear(weights, f"{name}.down", h)


def loss(
    weights: dict[str, torch.Tensor], shape: Any, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The mean loss of tokens and targets [B, T] under a dict of weights by our names."""
    table = weights["embedding.token"]
    x = table[tokens]
    if (positions := weights.get("embedding.position")) is not None:
        x = x + positions
    for number in range(shape.layers):
        x = _block(weights, f"layers.{number}", x, shape)
    head = table if shape.tied else weights["head.table"]
    logits = norm(weights, "head.norm", x, shape.epsilon) @ head[: shape.vocabulary].T
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORE
    )


def weights_of(parameters: Parameters) -> dict[str, torch.Tensor]:
    """The weights of a serial hpc3d model as leaves that want gradients."""
    return {item.name: torch.tensor(item.value, requires_grad=True) for item in parameters}


def training_step(
    parameters: Parameters, shape: Any, train: TrainConfig, tokens: np.ndarray, targets: np.ndarray
) -> Callable[[], None]:
    """A function that trains torch's copy of a serial model for a step, with one thread."""
    torch.set_num_threads(1)
    weights = weights_of(parameters)
    optimizer = torch.optim.AdamW(weights.values(), lr=train.learning_rate)
    tokens, targets = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()

    def step():
        optimizer.zero_grad()
        loss(weights, shape, tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), train.clip)
        optimizer.step()

    return step
