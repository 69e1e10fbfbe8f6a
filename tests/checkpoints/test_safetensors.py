"""Reading and writing of safetensors files, including damaged ones."""

import json
import os
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hpc3d.checkpoints.safetensors import Weights, write

ARRAYS = {
    "matrix": np.arange(6, dtype="f4").reshape(2, 3),
    "odd": np.arange(5, dtype="f2"),
    "none": np.empty((0, 4), "f8"),
    "wide": np.array([1e300, -0.0]),
    "one": np.array(7, "f4"),
}


def table_of(**entries):
    """Return the bytes of a file with a table and 8 bytes of arrays."""
    return file_of(json.dumps(entries).encode())


def file_of(text, arrays=bytes(8)):
    return len(text).to_bytes(8, "little") + text + arrays


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_arrays_round_trip(tmp_path):
    path = tmp_path / "ours.safetensors"
    write(path, ARRAYS)
    weights = Weights(path)
    assert weights.entries.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        found = weights.read(name)
        assert weights.entries[name].shape == array.shape
        assert found.dtype == (np.float64 if array.dtype == np.float64 else np.float32)
        np.testing.assert_array_equal(found, array, strict=False)
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_file_mode_follows_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write(tmp_path / "ours.safetensors", ARRAYS)
    finally:
        os.umask(before)
    assert (tmp_path / "ours.safetensors").stat().st_mode & 0o777 == mode


def test_bfloat16_is_widened_as_in_torch(tmp_path):
    path = tmp_path / "short.safetensors"
    numbers = torch.tensor([1.0, -3.14159, 1e-40, float("inf"), float("nan"), 65504.0])
    numbers = numbers.to(torch.bfloat16)
    safetensors.torch.save_file({"x": numbers}, path)
    np.testing.assert_array_equal(Weights(path).read("x"), numbers.float().numpy())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(8),
        b"\xff" * 8 + b"{}",
        (5).to_bytes(8, "little") + b"{}",
        file_of(b"[]"),
        file_of(b"{} x"),
        file_of(b"\xff{}"),
        file_of(b"[" * 100_000),
        table_of(a=entry()) + b"x",
        table_of(a=entry())[:-1],
        table_of(),
        table_of(a=entry(offsets=(4, 12))),
        table_of(a=entry(), b=entry()),
        table_of(a=entry(shape=(3,))),
        table_of(a=entry(shape=(1 << 70, 1 << 70))),
        table_of(a=entry(shape=(-1, -2))),
        table_of(a=entry(offsets=(8, 0))),
        table_of(a={"dtype": "F32", "shape": [2]}),
        table_of(a=None),
        table_of(a=entry("F\n\x1e")),
    ],
)
def test_malformed_file_is_rejected(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        Weights(path)
    line = str(refused.value)
    assert line.startswith(f"{path} ") and line.isprintable()


def test_missing_safetensors_package_is_reported_with_a_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="needs safetensors: pip install safetensors"):
        write(tmp_path / "none", ARRAYS)


def test_unsupported_dtype_is_rejected_when_read(tmp_path):
    path = tmp_path / "integers.safetensors"
    save_file({"x": np.arange(3), "y": np.ones(3)}, path)
    weights = Weights(path)
    assert weights.read("y").tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"'x' .* 'I64'; .* F64, F32, F16, BF16"):
        weights.read("x")


GOOD = table_of(a=entry(), b=entry("F16", (0,), (8, 8)))


@given(st.data())
def test_corrupted_file_is_read_or_rejected(tmp_path_factory, data):
    """Bytes are changed, removed or added; the only exception is ValueError."""
    place = data.draw(st.integers(0, len(GOOD) - 1))
    removed = data.draw(st.integers(0, 4))
    content = GOOD[:place] + data.draw(st.binary(max_size=4)) + GOOD[place + removed :]
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    try:
        weights = Weights(path)
        arrays = [weights.read(name) for name in weights.entries]
    except ValueError as error:
        assert str(error).isprintable()
    else:
        assert sum(array.size for array in arrays) <= 8
