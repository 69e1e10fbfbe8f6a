"""Train GPT-2 with PyTorch's own parallelism, for `bench peers`.

    torchrun --nproc-per-node N -m hpc3d.benchmarks.torch_peers PEER FOLDER

FOLDER contains `job.json` with the sizes and the optimizer's hyperparameters, and `start.npz` with
the initial weights and the batches of all steps. Rank 0 writes the loss and the time in s of each
step, and the received bytes per rank and step, to `result.json`. All peers train with gloo on
CPUs, with gradient clipping and fused AdamW, and report the loss of every step, as hpc3d does.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

_CPU = torch.device("cpu")
_RECEIVED = slice(128, 136)  # tcpi_bytes_received in struct tcp_info


class GPTBlock(nn.Module):
    """Transformer block of GPT-2."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self._attention(self.qkv(self.norm1(x))))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def _attention(self, qkv: Tensor) -> Tensor:
        # The columns are [q | k | v] for each head, so a column shard contains complete heads.
        heads = qkv.unflatten(-1, (-1, 3, self.width))
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(-2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """GPT-2 without dropout and with untied embeddings, or the `layers` of a pipeline stage."""

    def __init__(self, sizes: Mapping[str, int], layers: range) -> None:
        super().__init__()
        hidden, vocabulary = sizes["hidden"], sizes["vocabulary"]
        self.is_first, self.is_last = layers.start == 0, layers.stop == sizes["layers"]
        if self.is_first:
            self.token = nn.Embedding(vocabulary, hidden)
            self.position = nn.Embedding(sizes["sequence"], hidden)
        self.layers = nn.ModuleDict({str(i): GPTBlock(hidden, sizes["heads"]) for i in layers})
        if self.is_last:
            self.norm = nn.LayerNorm(hidden)
            self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def _loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy loss."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


_Passes = Callable[[Tensor, Tensor], Tensor]  # (tokens, targets) -> loss of the full batch


class Peer(NamedTuple):
    """Models of a rank, one per pipeline stage, and the forward and backward passes of a step."""

    models: list[nn.Module]
    passes: _Passes
    pipelined: bool = False


class PeerJob(NamedTuple):
    """Sizes and initial weights of a run."""

    sizes: Mapping[str, Any]
    state: Mapping[str, Tensor]

    def model(self, layers: range | None = None) -> GPT:
        """Return the model, or the `layers` of a pipeline stage, with the initial weights."""
        model = GPT(self.sizes, layers or range(self.sizes["layers"]))
        model.to(self.state["token.weight"].dtype)
        model.load_state_dict({name: self.state[name] for name in model.state_dict()})
        return model


def _eager(job: PeerJob) -> Peer:
    model = job.model()
    return Peer([model], _data_parallel(model))


def _compiled(job: PeerJob) -> Peer:
    model = job.model()
    return Peer([model], _data_parallel(torch.compile(model)))


def _ddp(job: PeerJob) -> Peer:
    """DistributedDataParallel: all-reduce the gradients during the backward pass."""
    model = DistributedDataParallel(job.model())
    return Peer([model], _data_parallel(model))


def _fsdp2(job: PeerJob) -> Peer:
    """FSDP2: shard parameters, gradients and optimizer states, one unit per block."""
    model = job.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Peer([model], _data_parallel(model))


def _data_parallel(model: Callable[[Tensor], Tensor]) -> _Passes:
    """Each rank trains on its part of the batch. The loss is the mean over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def passes(tokens: Tensor, targets: Tensor) -> Tensor:
        tokens, targets = (each.chunk(ranks)[rank] for each in (tokens, targets))
        loss = _loss_of(model(tokens), targets)
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / ranks

    return passes


def _tensor_parallel(job: PeerJob, sequence: bool = False) -> Peer:
    """DTensor tensor parallelism as in Megatron-LM, optionally with sequence parallelism.

    The vocabulary is sharded in the embedding, the head and the loss.
    """
    model = job.model()
    # Layout of the activations [batch, sequence, hidden] between the products.
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "layers.*.qkv": ColwiseParallel(input_layouts=between),
        "layers.*.proj": RowwiseParallel(output_layouts=between),
        "layers.*.up": ColwiseParallel(input_layouts=between),
        "layers.*.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence:
        plan["position"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        plan |= dict.fromkeys(("layers.*.norm1", "layers.*.norm2", "norm"), SequenceParallel())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, plan)

    def passes(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = _loss_of(model(tokens), targets)
            loss.backward()
        return _full(loss.detach())

    return Peer([model], passes)


def _sequence_parallel(job: PeerJob) -> Peer:
    return _tensor_parallel(job, sequence=True)


def _pipeline(job: PeerJob) -> Peer:
    """Pipeline with the 1F1B schedule, or with interleaved 1F1B for several chunks per rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks, layers = job.sizes["chunks"], job.sizes["layers"]
    count = ranks * chunks
    numbers = range(rank, count, ranks)
    ranges = [range(n * layers // count, (n + 1) * layers // count) for n in numbers]
    models = [job.model(each) for each in ranges]
    stages = [
        PipelineStage(model, n, count, _CPU) for model, n in zip(models, numbers, strict=True)
    ]
    micros, dtype = job.sizes["microbatches"], job.state["token.weight"].dtype
    if chunks > 1:
        schedule: Any = ScheduleInterleaved1F1B(stages, micros, loss_fn=_loss_of)
    else:
        schedule = Schedule1F1B(stages[0], micros, loss_fn=_loss_of)

    def passes(tokens: Tensor, targets: Tensor) -> Tensor:
        inputs, losses = [tokens] if rank == 0 else [], []
        target = targets if rank == ranks - 1 else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), dtype=dtype)
        dist.all_reduce(loss)  # only the last stage has losses
        return loss

    return Peer(models, passes, pipelined=True)


def _optimizer_of(models: list[nn.Module], train: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return fused AdamW, with weight decay for matrices only.

    Fused kernels and norms do not accept DTensors and plain tensors together, so these are in
    separate groups.
    """
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for model in models:
        for weight in model.parameters():
            groups.setdefault((weight.ndim > 1, isinstance(weight, DTensor)), []).append(weight)
    return torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": train["weight_decay"] if matrices else 0.0}
            for (matrices, _), weights in groups.items()
        ],
        lr=train["learning_rate"],
        betas=(train["beta1"], train["beta2"]),
        eps=train["epsilon"],
        fused=True,
    )


def _clip(optimizer: torch.optim.Optimizer, limit: float, pipelined: bool) -> None:
    """Clip the gradients by their global norm, over the groups and the pipeline stages."""
    groups = [group["params"] for group in optimizer.param_groups]
    norms = [_full(get_total_norm([w.grad for w in weights])) for weights in groups]
    squares = torch.stack(norms).square().sum()
    if pipelined:
        dist.all_reduce(squares)
    for weights in groups:
        clip_grads_with_norm_(weights, limit, squares.sqrt())


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


PEERS: dict[str, Callable[[PeerJob], Peer]] = {
    "eager": _eager,
    "compile": _compiled,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "tp": _tensor_parallel,
    "tp-sequence": _sequence_parallel,
    "1f1b": _pipeline,
    "interleaved": _pipeline,
}


def _state_of(weights: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Convert the weights of hpc3d to the names and shapes of `GPT`.

    hpc3d stores the weights of a layer as [inputs, outputs].
    """
    names = {"embedding.token": "token.weight", "embedding.position": "position.weight"}
    names |= {"head.table": "head.weight"}
    names |= {"head.norm.gamma": "norm.weight", "head.norm.beta": "norm.bias"}
    found = {}
    for name, array in weights.items():
        value = torch.from_numpy(array)
        other = name.replace(".gamma", ".weight").replace(".beta", ".bias")
        is_product = name not in names and value.ndim == 2
        found[names.get(name, other)] = value.T if is_product else value
    return found


def _received() -> int:
    """Return the bytes that this process has received over its open TCP connections (Linux)."""
    total = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listed folder is closed
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as each:
                    total += _received_by(each)
    return total


def _received_by(connection: socket.socket) -> int:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[_RECEIVED], sys.byteorder)


def _received_per_rank() -> float:
    """Return the bytes that a rank has received so far, averaged over ranks."""
    dist.barrier()  # no rank sends data of the next step before all ranks have counted
    count = torch.tensor(_received(), dtype=torch.float64)
    dist.all_reduce(count)
    return count.item() / dist.get_world_size()


def _train(peer: Peer, job: Mapping[str, Any], batches: Tensor) -> dict[str, Any]:
    """Train for one step per batch. The received bytes exclude the first step."""
    optimizer = _optimizer_of(peer.models, job)
    losses, seconds, before = [], [], 0.0
    for number, (tokens, targets) in enumerate(batches):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = peer.passes(tokens, targets)
        if job["clip"]:
            _clip(optimizer, job["clip"], peer.pipelined)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if number == 0:
            before = _received_per_rank()
    received = (_received_per_rank() - before) / max(1, len(batches) - 1)
    return {"losses": losses, "seconds": seconds, "received": received}


def main(name: str, folder: Path) -> Peer:
    """Train the peer `name` on this rank, write the result on rank 0, and return the peer."""
    dist.init_process_group("gloo")
    job = json.loads((folder / "job.json").read_text("utf-8"))
    with np.load(folder / "start.npz") as start:
        arrays = dict(start)
    batches = torch.from_numpy(arrays.pop("batches")).long()
    peer = PEERS[name](PeerJob(job, _state_of(arrays)))
    arrays.clear()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS: exclude the loading of weights
    result = _train(peer, job, batches)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result), "utf-8")
    dist.destroy_process_group()
    return peer


if __name__ == "__main__":
    trained = main(sys.argv[1], Path(sys.argv[2]))
    # Skip destructors: in torch 2.13, the destructor of DistributedDataParallel holds the GIL and
    # waits for a thread of gloo, which can itself wait for the GIL.
    os._exit(0)
