"""Tensors saved by torch for the backward pass: rounded and offloaded; values and bytes."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import torch
from torch.nn import functional

from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh, NullRecorder
from hpc3d.partition.execution.saved_tensors import SavedOfMicrobatch, SavedTensors
from hpc3d.partition.execution.torch_stage import TorchStage
from tests.model.test_kept import ROUNDED
from tests.partition.execution.modules import (
    HERE,
    assert_trained_alike,
    on_ranks,
    prepared,
    trained,
    trained_by_torch,
)

aten = torch.ops.aten
BOTH = ("optimizer", "activations")
CHAIN, NOISY = f"{HERE}:chain", f"{HERE}:noisy"


def watching(meshes):
    """Return a function for `watched` that collects the mesh of each rank."""

    def watched(mesh):
        meshes[mesh.rank] = mesh
        return mesh

    return watched


@pytest.mark.parametrize(
    ("name", "schedule", "how"),
    [
        (f"{HERE}:everything", "zb-h1", {"zero": 1}),
        pytest.param(NOISY, "1f1b", {}, marks=pytest.mark.slow),
        pytest.param(NOISY, "gpipe", {"recompute": True}, marks=pytest.mark.slow),
        pytest.param("inputs.partition.resnet:small", "1f1b", {}, marks=pytest.mark.slow),
        pytest.param("inputs.partition.bert:small", "1f1b", {"zero": 1}, marks=pytest.mark.slow),
    ],
)
def test_offloading_is_bitwise_identical(name, schedule, how):
    plain, meshes = trained(name, (2, 1), 2, schedule, **how), {}
    found = trained(name, (2, 1), 2, schedule, offload=BOTH, watched=watching(meshes), **how)
    for (ours, losses), (theirs, expected) in zip(found, plain, strict=True):
        assert losses == expected
        for key, value in theirs.items():
            np.testing.assert_array_equal(ours[key], value, err_msg=key)
    for mesh in meshes.values():
        assert mesh.pool.peak["offloaded"] >= mesh.pool.live["offloaded"] > 0


class _Spans(NullRecorder):
    """Recorder whose events must not overlap."""

    def __init__(self):
        self.open, self.names = None, set()

    @contextmanager
    def span(self, name, *_):
        assert self.open is None, f"{name} in {self.open}"
        self.open = name
        self.names.add(name)
        yield
        self.open = None

    copying = span


def test_copies_interrupt_the_events_of_a_pass():
    spans = {}

    def watched(mesh):
        mesh.trace = spans[mesh.rank] = _Spans()
        return mesh

    how = {"offload": BOTH, "keep_dtype": "int8", "watched": watched}
    trained(CHAIN, (1, 1), 2, "1f1b", **how)
    assert {"operations", "gradients", "round", "offload", "fetch"} <= spans[0].names


def peaks(name, schedule="gpipe", micros=4, **how):
    """Return [(live and peak bytes by kind)] of both ranks, in the last step."""
    meshes = {}
    trained(name, (1, 1), micros, schedule, watched=watching(meshes), **how)
    return [meshes[rank].pool for rank in range(2)]


def test_peak_memory_falls_by_the_offloaded_bytes():
    """Rank 0 has 5 layers, and saves 4 results of tanh (3 rows of 4) in each of 4 microbatches."""
    name, block = f"{HERE}:chain(8)", 3 * 4 * 8
    plain, states, both = peaks(name), peaks(name, offload=BOTH[:1]), peaks(name, offload=BOTH)
    moments, saved = 2 * 5 * (4 * 4 + 4) * 8, 4 * 4 * block
    assert (plain[0].peak["optimizer"], plain[0].peak["activation"]) == (moments, saved)
    assert (states[0].peak["optimizer"], states[0].peak["offloaded"]) == (0, moments)
    assert (both[0].peak["activation"], both[0].peak["offloaded"]) == (block, moments + saved)
    for pool in (*plain, *states, *both):
        assert pool.live["activation"] == 0


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", 2), ("int8", 1), ("float8", 1)])
def test_rounded_activations_have_the_bytes_of_their_type(dtype, nbytes):
    (first, _), scales = peaks(f"{HERE}:chain(8)", keep_dtype=dtype), 4 * (nbytes == 1)
    saved = 4 * 4 * 3 * (4 * nbytes + scales)
    assert saved <= first.peak["activation"] <= saved + 3 * (3 * 4 * 8)


def rounding(held, dtype, shapes=None):
    """Hooks that round all saved tensors (of some shapes), except those in memory of `held`."""
    held = {each.untyped_storage().data_ptr() for each in held}

    def pack(tensor):
        stays = tensor.untyped_storage().data_ptr() in held
        stays = stays or (shapes is not None and tensor.shape not in shapes)
        return tensor if stays else ROUNDED[dtype](tensor.detach())

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("replicas", [(1,), (2, 1)])
def test_keep_dtype_matches_rounded_saved_tensors_of_torch(dtype, replicas, monkeypatch):
    """In a chain of linear layers and tanh, each result is saved once for two operations."""
    schedule = "1f1b" if replicas[1:] else "none"
    found = trained(CHAIN, replicas, 2, schedule, keep_dtype=dtype)
    module, inputs, _ = prepared(CHAIN)
    module = copy.deepcopy(module)
    monkeypatch.setattr(copy, "deepcopy", lambda _: module)
    with rounding([*module.parameters(), *inputs], dtype):
        expected = trained_by_torch(CHAIN, 2)
    assert_trained_alike(found, expected)
    monkeypatch.undo()
    plain, _ = trained_by_torch(CHAIN, 2)
    changed = max(np.abs(expected[0][key] - plain[key]).max() for key in plain)
    assert 1e-8 < changed < 0.05


def gradients(run, inputs, **how):
    """Return gradients of the sum of `run(*inputs)`, whose operations save with `how`."""
    mesh = Mesh({}, {}, {}, Self())
    inputs = [each.clone().requires_grad_() for each in inputs]
    saved = SavedTensors(mesh, "float64", **how).microbatch(inputs)
    with saved.saving():
        result = run(*inputs)
    result.sum().backward()
    return [each.grad for each in inputs], mesh.pool


def attention(q, k, v):
    return aten.scaled_dot_product_attention.default(q, k, v, scale=30.0)


def normed(x, weight):
    x = aten.mul.Tensor(x, 1.0)
    y = aten.layer_norm.default(x, [8], weight)
    mean = aten.mean.dim(y * y, [-1], True)
    return y * aten.rsqrt.default(mean)


def by_class(x, weight):
    return aten.cross_entropy_loss.default(aten.linear.default(x, weight), torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("run", "shapes", "rounded"),
    [
        (attention, [(2, 2, 6, 8)] * 3, [(2, 2, 6, 8)]),
        (normed, [(4, 8), (8,)], [(4, 8)]),
        (by_class, [(2, 8), (9, 8)], []),
    ],
)
def test_statistics_inside_an_operation_stay_exact(run, shapes, rounded):
    """The log-sum-exp of attention, the mean of a norm, and the log-softmax of a loss."""
    draws = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    found, _ = gradients(run, inputs, keep_dtype="bfloat16")
    inputs = [each.requires_grad_() for each in inputs]
    with rounding(inputs, "bfloat16", rounded):
        expected = torch.autograd.grad(run(*inputs).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_views_and_other_types_return_unchanged_from_the_store():
    """Transposed, complex-conjugate and integer tensors, and masks."""

    def run(x):
        y = aten.sin.default(x)
        z = aten.mul.Tensor(y.t(), torch.fft.fft(y).conj().imag.t())
        best, _ = aten.max_pool2d_with_indices.default(z[None, None], [2, 2])
        return best * functional.dropout(y, 0.0).sum() * aten.relu.default(y).sum()

    x = torch.linspace(-3, 3, 48, dtype=torch.float64).view(6, 8)
    (plain,), _ = gradients(run, [x])
    (moved,), pool = gradients(run, [x], offload=True)
    assert torch.equal(moved, plain)
    assert pool.peak["offloaded"] > 0 == pool.live["offloaded"] == pool.live["activation"]


def test_noise_that_an_operation_writes_is_saved_after_the_operation():
    def run(x):
        noise = torch.zeros_like(x)
        torch.manual_seed(0)
        return aten.rrelu_with_noise.default(x, noise, 0.1, 0.3, True)

    x = torch.linspace(-3, 3, 48, dtype=torch.float64)
    for how in ({}, {"offload": True}):
        assert gradients(run, [x], **how)[0][0].min() >= 0.1


def test_saved_tensor_that_is_modified_in_place_is_refused():
    def run(x):
        y = aten.sigmoid.default(x)
        z = y * 2.0
        y.detach().add_(1.0)
        return z

    with pytest.raises(RuntimeError, match=r"shape \[4\] .* was modified by an in-place"):
        gradients(run, [torch.ones(4, dtype=torch.float64)])


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"offload": BOTH, "keep_dtype": None}, marks=pytest.mark.slow),
        pytest.param({"recompute": True}, marks=pytest.mark.slow),
    ],
)
def test_buffer_that_each_microbatch_modifies_is_saved(how):
    """The first stage has two microbatches in flight, each with its own values."""
    name = f"{HERE}:growing"
    found = trained(name, (1, 1), 3, "1f1b", **how)
    assert_trained_alike(found, trained_by_torch(name, 3))


@pytest.mark.parametrize(
    ("name", "schedule", "passes"),
    [
        ("everything", "1f1b", 2 * 2 + 1),
        pytest.param("growing", "1f1b", None, marks=pytest.mark.slow),
        pytest.param("chain", "gpipe", 3 * 3, marks=pytest.mark.slow),
    ],
)
def test_saved_bytes_are_counted_by_hooks_in_the_first_passes_only(
    name, schedule, passes, monkeypatch
):
    """In later passes without hooks, the pool has the same peaks as with hooks."""
    counted, saving = [], SavedOfMicrobatch.saving
    monkeypatch.setattr(
        SavedOfMicrobatch, "saving", lambda self: counted.append(None) or saving(self)
    )

    def peaks(trainer):
        return [(trainer.step(number).loss, dict(trainer.mesh.pool.peak)) for number in range(3)]

    found = on_ranks(peaks, f"{HERE}:{name}", (2, 1), 3, schedule)
    assert len(counted) == (passes or 3 * 3 * 3)
    monkeypatch.setattr(TorchStage, "_repeats", lambda *_: False)
    assert on_ranks(peaks, f"{HERE}:{name}", (2, 1), 3, schedule) == found
    assert all(peak["activation"] for steps in found for _, peak in steps)
