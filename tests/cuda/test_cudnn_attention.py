"""Attention with cuDNN, using a fake cuDNN in host memory."""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from hpc3d.cuda import cudnn_attention
from hpc3d.cuda.cudnn_attention import Flash
from hpc3d.ops.attention import (
    AttentionMask,
    HeadForm,
    attend,
    attend_grad,
    heads_of,
    queries_of,
)
from tests.fakes.fake_cudnn import RUBBISH, FakeCudnn, NotSupportedError
from tests.fakes.fake_device import DeviceArray, plain

STREAM = 0x5E
GUARD = 64  # bytes
SPACING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # of the numbers from 1 to 2
SHAPES = [
    # B, T, heads of keys, (D, queries of a key)
    (2, 5, 3, HeadForm(8)),
    (1, 7, 1, HeadForm(16)),
    (3, 2, 2, HeadForm(64)),
    (1, 33, 4, HeadForm(128)),
    (2, 128, 1, HeadForm(24)),
    (1, 3, 2, HeadForm(256)),
    (2, 5, 3, HeadForm(8, 2)),
    (1, 7, 1, HeadForm(16, 4)),
]
ONE = HeadForm(8)
MASKED = -(2.0**15)  # bias of masked keys


class Memory:
    """Device memory: arrays of arbitrary values, each between two guards."""

    def __init__(self):
        self.arrays, self.guarded = [], []

    def empty(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(-(-size // GUARD) * GUARD + 3 * GUARD, RUBBISH - 1, np.uint8)
        start = GUARD + -memory.ctypes.data % GUARD
        self.guarded.append((memory, start, start + size))
        array = memory[start : start + size].view(dtype).reshape(shape).view(DeviceArray)
        self.arrays.append(array)
        return array

    def bring(self, values, dtype):
        array = self.empty(values.shape, dtype)
        plain(array)[...] = values
        return array

    def holds(self, pointer, size):
        """Return True if one of the arrays contains these bytes."""
        at = [(memory.ctypes.data + first, last - first) for memory, first, last in self.guarded]
        return any(start <= pointer and pointer + size <= start + n for start, n in at)

    def check(self):
        for memory, start, end in self.guarded:
            assert (memory[:start] == RUBBISH - 1).all()
            assert (memory[end:] == RUBBISH - 1).all()


@pytest.fixture
def memory():
    made = Memory()
    yield made
    made.check()


@pytest.fixture
def cudnn(memory, monkeypatch):
    fake = FakeCudnn(memory.holds)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    return fake


@pytest.fixture
def attention(cudnn, memory):
    return Flash(memory.empty, STREAM, "90")


def normal(*shape, seed=3):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def given(memory, shape, dtype):
    """Return qkv and the gradient of out on the device, after rounding."""
    batch, sequence, heads, form = shape
    qkv = memory.bring(normal(batch * sequence, heads * form.columns), dtype)
    columns = heads * form.queries * form.width
    dout = memory.bring(normal(batch * sequence, columns, seed=4), dtype)
    return qkv, dout


def padding_of(batch, keys):
    """Return padding keys: each third one, and the last ones of the first sample."""
    padding = np.arange(batch * keys).reshape(batch, keys) % 3 == 1
    padding[0, -(-keys // 2) :] = True
    return padding


def wide(array):
    return plain(array).astype(np.float32)


def close(array, expected, dtype):
    bound = 1.5 * SPACING[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(wide(array), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", cudnn_attention.TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("causal", "window", "padded"),
    [(True, 0, False), (False, 0, False), (True, 2, False), (False, 0, True)],
)
def test_cudnn_attention_matches_the_unfused_path(
    attention, memory, shape, dtype, causal, window, padded
):
    batch, sequence, _, form = shape
    qkv, dout = given(memory, shape, dtype)
    padding = padding_of(batch, sequence) if padded else None
    bias = memory.bring(np.where(padding, MASKED, 0), dtype) if padded else None
    out, stats = attention.forward(qkv, sequence, form, causal, window, bias)
    dqkv = attention.backward(dout, qkv, out, stats, sequence, form, causal, window, bias=bias)
    sizes = sequence, form, np.empty
    mask = AttentionMask(causal, padding, window)
    expected, probabilities = attend(wide(qkv), *sizes, mask=mask)
    assert out.dtype == dqkv.dtype == dtype and stats.dtype == np.float32
    close(out, expected, dtype)
    plain_path = wide(dout), wide(qkv), probabilities, *sizes
    close(dqkv, attend_grad(*plain_path, mask=mask), dtype)


def test_stats_are_log_sum_exp_of_the_scores(attention, memory):
    qkv, _ = given(memory, (2, 6, 3, ONE), "float16")
    _, stats = attention.forward(qkv, 6, ONE)
    q, k, _ = wide(qkv).reshape(2, 6, 3, 3, 8).transpose(3, 0, 2, 1, 4)
    for place in np.ndindex(2, 3, 6):
        row = k[place[:2]][: place[2] + 1] @ q[place] / np.sqrt(8)
        np.testing.assert_allclose(stats[place], np.log(np.exp(row).sum()), rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_cudnn_attention_matches_torch(attention, memory, queries, padded):
    batch, sequence, heads, form = 2, 37, 3, HeadForm(32, queries)
    qkv, dout = given(memory, (batch, sequence, heads, form), "bfloat16")
    padding = padding_of(batch, sequence) if padded else np.zeros((batch, sequence))
    bias = memory.bring(MASKED * padding, "bfloat16") if padded else None
    out, stats = attention.forward(qkv, sequence, form, not padded, bias=bias)
    dqkv = attention.backward(dout, qkv, out, stats, sequence, form, not padded, bias=bias)
    leaf = torch.from_numpy(wide(qkv)).requires_grad_()
    if queries == 1:
        q, k, v = leaf.view(batch, sequence, heads, 3, 32).permute(3, 0, 2, 1, 4)
    else:
        parts = leaf.view(batch, sequence, -1, 32).transpose(1, 2)
        q, k, v = parts.split([queries * heads, heads, heads], 1)
    mask = {"attn_mask": visible(padding)} if padded else {"is_causal": True}
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask)
    theirs = theirs.transpose(1, 2).reshape(out.shape)
    theirs.backward(torch.from_numpy(wide(dout)))
    close(out, theirs.detach().numpy(), "bfloat16")
    close(dqkv, leaf.grad.numpy(), "bfloat16")


def visible(padding):
    """Return the attention mask of torch, which is True for keys that are not masked."""
    return torch.from_numpy(padding == 0)[:, None, None]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_hop_of_some_queries_and_keys_matches_torch(attention, memory, queries, padded):
    """Tests the last 4 of 6 queries and the last 3 of 4 keys."""
    batch, sequence, heads, form = 2, 6, 3, HeadForm(32, queries)
    qkv, dout = given(memory, (batch, sequence, heads, form), "bfloat16")
    k, v = memory.bring(normal(2, batch, heads, 4, 32, seed=5), "bfloat16")[:, :, :, 1:]
    views = heads_of(qkv, sequence, form)[0], queries_of(dout, sequence, form)
    q, d = (view[:, :, :, 2:] for view in views)
    padding = padding_of(batch, 3) if padded else np.zeros((batch, 3))
    mask = {
        "causal": False,
        "bias": memory.bring(MASKED * padding, "bfloat16") if padded else None,
    }
    out, sums = attention.hop(q, k, v, **mask)
    out = out.transpose(0, 2, 3, 1, 4)
    dq, (dk, dv) = attention.hop_grad(d, (q, k, v), out, sums, **mask)
    leaves = [torch.from_numpy(wide(each).copy()).requires_grad_() for each in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        leaves[0].flatten(1, 2), *leaves[1:], visible(padding), enable_gqa=True
    ).unflatten(1, (heads, queries))
    theirs.backward(torch.from_numpy(wide(d).copy()))
    close(out, theirs.detach().numpy(), "bfloat16")
    for found, leaf in zip((dq.transpose(0, 2, 3, 1, 4), dk, dv), leaves, strict=True):
        close(found, leaf.grad.numpy(), "bfloat16")


def test_graphs_are_cached_by_shape_and_dtype(attention, cudnn, memory):
    def call(shape, dtype):
        qkv, dout = given(memory, shape, dtype)
        out, stats = attention.forward(qkv, shape[1], shape[3])
        attention.backward(dout, qkv, out, stats, shape[1], shape[3])

    first = 2, 6, 3, ONE
    others = (1, 6, 3, ONE), (2, 3, 3, ONE), (2, 6, 1, ONE), (1, 6, 6, ONE)
    others += (2, 6, 3, HeadForm(16)), (2, 6, 3, HeadForm(8, 2))
    cases = [(first, "float16"), (first, "bfloat16"), *((other, "float16") for other in others)]
    for case in cases:
        call(*case)
    assert len(cudnn.graphs) == 2 * len(cases)
    before = len(memory.arrays)
    for case in cases:
        call(*case)
    assert len(cudnn.graphs) == 2 * len(cases)
    assert [len(graph.workspaces) for graph in cudnn.graphs] == [2] * len(cudnn.graphs)
    # A steady call asks for its outputs only: two given arrays, out, stats and dqkv.
    assert len(memory.arrays) - before == 5 * len(cases)


def test_graphs_with_and_without_a_bias_differ(attention, cudnn, memory):
    qkv, _ = given(memory, (2, 6, 3, ONE), "float16")
    bias = memory.bring(np.zeros((2, 6)), "float16")
    outs = [attention.forward(qkv, 6, ONE, bias=each)[0] for each in (None, bias, None, bias)]
    assert len(cudnn.graphs) == 2
    assert all((plain(out) == plain(outs[0])).all() for out in outs)


def test_graph_keeps_its_workspace_when_a_larger_one_is_allocated(attention, cudnn, memory):
    for batch, sequence in (1, 2), (2, 16), (2, 2), (1, 2):
        qkv, _ = given(memory, (batch, sequence, 1, ONE), "float16")
        attention.forward(qkv, sequence, ONE)
    small, large = (array.data.ptr for array in memory.arrays if array.dtype == np.uint8)
    assert [graph.workspaces for graph in cudnn.graphs] == [[small] * 2, [large], [large]]


def test_zero_workspace_still_has_a_pointer(attention, cudnn, memory):
    cudnn.workspace = 0
    qkv, _ = given(memory, (1, 4, 1, ONE), "float16")
    attention.forward(qkv, 4, ONE)
    assert type(attention.workspace.data.ptr) is int


def test_attention_runs_on_the_given_stream(attention, cudnn):
    assert list(cudnn.streams.values()) == [STREAM]


@pytest.mark.parametrize(
    ("capability", "widths"),
    [("75", []), ("80", [8, 128]), ("90", [8, 128, 256]), ("100", [8, 128])],
)
def test_supported_head_widths_by_compute_capability(cudnn, memory, capability, widths):
    attention = Flash(memory.empty, STREAM, capability)
    half = np.dtype(np.float16)
    assert [w for w in (4, 8, 12, 128, 256, 264) if attention.suits(half, w)] == widths
    assert attention.suits(np.dtype(ml_dtypes.bfloat16), 8) == bool(widths)
    assert not attention.suits(np.dtype(np.float32), 8)
    assert not attention.suits(half, 8, drop=object())


def test_sequence_lengths_that_can_be_captured():
    assert [length for length in (64, 100, 128, 200, 1024) if Flash.replays(length)] == [128, 1024]


@pytest.mark.parametrize(
    "failure",
    [NotSupportedError("no\n engine"), RuntimeError("no\n engine"), ValueError("no engine")],
    ids=lambda failure: type(failure).__name__,
)
def test_cudnn_error_is_reported_in_one_line(attention, cudnn, memory, failure):
    qkv, _ = given(memory, (1, 4, 1, ONE), "bfloat16")
    cudnn.failure = failure
    with pytest.raises(
        RuntimeError, match=r"^cuDNN 9.19.0 cannot build .*sequence=4.*: no engine$"
    ):
        attention.forward(qkv, 4, ONE)
    cudnn.failure = RuntimeError("No valid engine configs\n" + 500 * "engine: not supported\n")
    with pytest.raises(RuntimeError, match="No valid engine configs engine: not") as raised:
        attention.forward(qkv, 4, ONE)
    assert len(f"{raised.value}".splitlines()) == 1 and len(f"{raised.value}") < 600
    cudnn.failure = None
    attention.forward(qkv, 4, ONE)  # nothing of the failure was kept
    cudnn.failure = failure
    with pytest.raises(RuntimeError, match=r"^cuDNN 9.19.0 cannot run attention: no engine$"):
        attention.forward(qkv, 4, ONE)


def test_error_of_a_hop_states_its_sizes(attention, cudnn, memory):
    q = memory.bring(normal(1, 2, 1, 4, 8), "float16")
    k, v = memory.bring(normal(2, 1, 2, 3, 8), "float16")
    cudnn.failure = RuntimeError("no engine")
    sizes = r"float16 q \(1, 2, 4, 8\) and k \(1, 2, 3, 8\) with"
    with pytest.raises(RuntimeError, match=f"build attention of {sizes} no mask: no engine$"):
        attention.hop(q, k, v, causal=False)
    with pytest.raises(RuntimeError, match=f"{sizes} a window of 2 keys: no engine$"):
        attention.hop(q, k, v, causal=True, window=2)
    bias = memory.bring(np.zeros((1, 3)), "float16")
    with pytest.raises(RuntimeError, match=f"{sizes} no mask and padding: no engine$"):
        attention.hop(q, k, v, causal=False, bias=bias)


def test_gradient_of_a_single_token_is_not_supported_by_cudnn(attention, memory):
    qkv, dout = given(memory, (2, 1, 1, ONE), "bfloat16")
    out, stats = attention.forward(qkv, 1, ONE)
    with pytest.raises(RuntimeError, match=r"build attention_grad .*= 1 is not supported.$"):
        attention.backward(dout, qkv, out, stats, 1, ONE)


def no_cudnn(self):
    raise RuntimeError("Unable to find symbol cudnnGetVersion")


@pytest.mark.parametrize(
    ("lacks", "found", "word"),
    [
        ("nothing", [True, False], None),
        ("nothing", [False, False], "one-libcudart"),
        ("nothing", [True, True], "one-libcudart"),
        ("cuDNN", [True, False], "cuDNN"),
        ("frontend", [True, False], "nvidia-cudnn-frontend"),
    ],
)
def test_missing_component_is_named(cudnn, monkeypatch, lacks, found, word):
    monkeypatch.setattr(cudnn_attention, "preload", lambda: None)
    monkeypatch.setattr(
        cudnn_attention, "loads", dict(zip(cudnn_attention.RUNTIMES, found, strict=True)).get
    )
    if lacks == "cuDNN":
        monkeypatch.setattr(FakeCudnn, "backend_version", no_cudnn)
    if lacks == "frontend":
        monkeypatch.setitem(sys.modules, "cudnn", None)
    assert Flash.missing() == word


@pytest.mark.parametrize("loaded", [False, True])
def test_cudnn_import_does_not_load_torch(monkeypatch, tmp_path, loaded):
    (tmp_path / "cudnn.py").write_text("try:\n  import torch\nexcept ImportError:\n  torch = None")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "cudnn", None)  # for the one before to come back
    del sys.modules["cudnn"]
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    assert cudnn_attention.frontend().torch is (torch if loaded else None)
    assert ("torch" in sys.modules) == loaded


def test_libraries_are_preloaded_from_packages(monkeypatch, tmp_path):
    """One requested library is missing, and one has a second part in the same folder."""
    asked, opened = [], []

    def load(name):
        asked.append(name)
        if name == "cudart":
            raise RuntimeError("not found")
        return SimpleNamespace(abs_path=str(tmp_path / name / "lib.so"))

    half = tmp_path / "nvrtc" / "libnvrtc-builtins.so.13.0"
    half.parent.mkdir()
    half.touch()
    pathfinder = SimpleNamespace(load_nvidia_dynamic_lib=load)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=pathfinder))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    monkeypatch.setattr(cudnn_attention.ctypes, "CDLL", opened.append)
    cudnn_attention.preload()
    assert asked == ["cudart", "nvrtc", "cudnn"] and opened == [str(half)]


def test_loads_checks_for_a_shared_library():
    assert cudnn_attention.loads("libc.so.6")
    assert not cudnn_attention.loads("libhpc3d-none.so.1")
