"""The same GPT-2 in torch, eager: what our gradients and our step time are compared with.

It follows hpc3d.model.gpt2 in sizes, names and the order of a head's columns [q | k | v], and is
otherwise plain torch: linear, layer_norm, gelu, scaled_dot_product_attention, cross_entropy.
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
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def norm(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    gamma, beta = weights[f"{name}.gamma"], weights[f"{name}.beta"]
    return functional.layer_norm(x, gamma.shape, gamma, beta, 1e-5)


def _attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal attention on [B, T, heads*3*D]."""
    batch, sequence, columns = qkv.shape
    parts = qkv.view(batch, sequence, heads, 3, columns // (3 * heads))
    q, k, v = parts.permute(3, 0, 2, 1, 4)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(batch, sequence, columns // 3)


def _block(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, shape: Any
) -> torch.Tensor:
    gelu = "tanh" if shape.gelu == "tanh" else "none"
    qkv = linear(weights, f"{name}.qkv", norm(weights, f"{name}.norm1", x))
    x = x + linear(weights, f"{name}.proj", _attention(qkv, shape.heads))
    h = linear(weights, f"{name}.up", norm(weights, f"{name}.norm2", x))
    return x + linear(weights, f"{name}.down", functional.gelu(h, approximate=gelu))


def loss(
    weights: dict[str, torch.Tensor], shape: Any, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The mean loss of tokens and targets [B, T] under a dict of weights by our names."""
    table = weights["embedding.token"]
    x = table[tokens] + weights["embedding.position"]
    for number in range(shape.layers):
        x = _block(weights, f"layers.{number}", x, shape)
    head = table if shape.tied else weights["head.table"]
    logits = norm(weights, "head.norm", x) @ head[: shape.vocabulary].T
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
