"""Tokens from text and token files, and the batches made of them."""

import re
import subprocess
import sys
from collections import Counter
from itertools import count, islice

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.data.batches import Batches
from hpc3d.data.token_file import Tokens, open_tokens, verify, write_tokens
from hpc3d.data.tokenizer import ByteTokenizer
from tests.elided import elided

TEXTS = {"b.txt": b"second, \xc3\xa9\n", "a.txt": b"first\n", "c.txt": b"", "d.md": b"no text"}
ROW = b"first\n\0second, \xc3\xa9\n\0\0"  # *.txt by name, each ended by NUL


class Numbers(Tokens):
    """Token source in which token i is i, so that a window shows its position."""

    tokenizer, json = "numbers", "{}"

    def __init__(self, length):
        self.length = self.vocabulary = length
        self.sha256 = f"{length} numbers"
        self.digests = frozenset({self.sha256})

    def __len__(self):
        return self.length

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.length
        return np.arange(start, stop, dtype=np.int32)


def message(path, tokenizer="byte"):
    """Return the error message for a path: one line that names the key and the path."""
    with (
        pytest.raises(ValueError, match=r"\Adata\.path: ") as caught,
        open_tokens(path, tokenizer),
    ):
        pass
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------- batches

sizes = {
    "sequence": st.integers(1, 9),
    "windows": st.integers(1, 12),
    "rest": st.integers(0, 8),
    "batch": st.integers(1, 15),
    "seed": st.integers(0, 2**64 - 1),
}


def starts(batches, steps):
    """Return the first token of each sequence, in the order of training."""
    return [int(start) for step in steps for start in batches.batch(step)[0][:, 0]]


@given(**sizes)
def test_epoch_contains_every_window_once(sequence, windows, rest, batch, seed):
    length = windows * sequence + 1 + rest % sequence
    batches = Batches(Numbers(length), sequence, batch, seed)
    order = starts(batches, range(3 * windows // batch + 1))
    every = [window * sequence for window in range(windows)]
    for epoch in range(3):
        assert sorted(order[epoch * windows : (epoch + 1) * windows]) == every


@given(**sizes)
def test_targets_are_the_inputs_shifted_by_one_token(sequence, windows, rest, batch, seed):
    batches = Batches(Numbers(windows * sequence + 1), sequence, batch, seed)
    inputs, targets = batches.batch(rest)
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(sequence))
    for array in (inputs, targets):
        assert array.shape == (batch, sequence) and array.dtype == np.int32
        assert array.flags.c_contiguous


@given(steps=st.lists(st.integers(0, 40), min_size=1), **sizes)
def test_batches_depend_only_on_the_step(sequence, windows, rest, batch, seed, steps):
    tokens = Numbers(windows * sequence + 1)
    straight = Batches(tokens, sequence, batch, seed)
    seen = [straight.batch(step)[0] for step in range(41)]
    jumping = Batches(tokens, sequence, batch, seed)
    for step in steps:
        assert np.array_equal(jumping.batch(step)[0], seen[step])
        assert np.array_equal(Batches(tokens, sequence, batch, seed).batch(step)[0], seen[step])


def test_new_batch_size_continues_after_the_seen_sequences():
    before, after = (Batches(Numbers(81), 4, batch, 7) for batch in (3, 5))
    seen = before.position(4)["sequences"]
    after.go_on(4, seen)
    assert after.position(4)["sequences"] == seen == 12
    one = Batches(Numbers(81), 4, 1, 7)
    expected = np.concatenate([one.batch(number)[0] for number in range(12, 22)])
    found = np.concatenate([after.batch(step)[0] for step in (4, 5)])
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("batch", [1, 4, 5, 11])
def test_batch_size_does_not_change_the_order(batch):
    one = starts(Batches(Numbers(51), 10, 1, 3), range(55))
    assert (
        starts(Batches(Numbers(51), 10, batch, 3), range(55 // batch))
        == one[: 55 // batch * batch]
    )


def test_order_differs_by_epoch_and_seed():
    orders = {
        tuple(starts(Batches(Numbers(501), 10, 50, seed), [epoch]))
        for seed in (0, 1, 2**64 - 1)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 9


def test_order_is_stable_across_numpy_versions():
    """A checkpoint may be resumed with another NumPy version, so the order must not change."""
    order = starts(Batches(Numbers(81), 10, 8, 1234), [0, 1])
    assert order[:8] == [30, 10, 60, 40, 50, 20, 70, 0]
    assert order[8:] == [40, 20, 0, 50, 70, 10, 60, 30]


def test_position_counts_sequences_and_epochs():
    batches = Batches(Numbers(7 * 3 + 1), 3, 5, 0)
    walk = ((epoch, offset) for epoch in count() for offset in range(7))
    for step, (epoch, offset) in enumerate(islice(walk, 0, 60, 5)):
        expected = {"epoch": epoch, "offset": offset, "sequences": 5 * step}
        assert batches.position(step) == expected


@pytest.mark.parametrize("length", [0, 1, 8])
def test_too_few_tokens_are_rejected(length):
    with pytest.raises(ValueError, match=r"\Adata\.path: .*model\.sequence = 8 .* 9;"):
        Batches(Numbers(length), 8, 1, 0)
    Batches(Numbers(9), 8, 1, 0)


# ------------------------------------------------------------------------------------- text


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_bytes(text)
    return tmp_path


def test_folder_is_read_as_its_texts_sorted_by_name(folder):
    before = sorted(folder.iterdir())
    with open_tokens(str(folder)) as tokens:
        assert tokens.vocabulary == 256 and len(tokens) == len(ROW)
        for start in range(len(ROW) + 1):
            for stop in range(start, len(ROW) + 1):
                found = tokens.read(start, stop)
                assert found.dtype == np.int32 and found.tolist() == list(ROW[start:stop])
    assert sorted(folder.iterdir()) == before


def test_single_text_is_read_as_bytes(folder):
    with open_tokens(folder / "d.md") as tokens:
        assert tokens.read(0, len(tokens)).tolist() == list(b"no text\0")


def test_text_is_read_without_heavy_libraries(folder):
    program = f"""
import sys
from hpc3d.data.batches import Batches
from hpc3d.data.token_file import open_tokens
Batches(open_tokens({str(folder)!r}), 4, 2, 0).batch(3)
print(sorted({{"h5py", "tokenizers", "pydantic", "mpi4py"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


@pytest.mark.parametrize(
    "damage",
    [
        b"\0",
        b"\xff",
        b"abc\xc3",
        b"\xed\xa0\x80",
        b"x" * (3 << 20) + b"\0",
        b"\xc3\xa9" * (2 << 20) + b"\xe9",
    ],
    ids=["nul", "latin", "cut", "surrogate", "late-nul", "late-latin"],
)
def test_file_that_is_no_utf8_text_is_rejected(folder, damage):
    (folder / "bad.txt").write_bytes(damage)
    assert re.search(r"bad\.txt .*UTF-8", message(folder))


def test_missing_and_empty_inputs_are_rejected(tmp_path):
    assert f"{tmp_path}/none " in message(tmp_path / "none")
    assert f"{tmp_path}/none.h5 " in message(tmp_path / "none.h5")
    assert re.search(rf"{tmp_path} .*\*\.txt", message(tmp_path))
    (tmp_path / "folder.h5").mkdir()
    assert "hpc3d.prepare" in message(tmp_path / "folder.h5")


def test_bpe_requires_a_token_file(folder):
    assert "python -m hpc3d.prepare --tokenizer bpe" in message(folder, "bpe")


@pytest.mark.parametrize("left", [0, 1, 5])
def test_text_that_was_truncated_after_opening_raises(folder, left):
    with open_tokens(folder) as tokens:
        (folder / "a.txt").write_bytes(b"first\n"[:left])
        with pytest.raises(ValueError, match=r"data\.path: .*a\.txt .*truncated"):
            tokens.read(0, 6)
        (folder / "a.txt").unlink()
        with pytest.raises(ValueError, match=r"data\.path: .*a\.txt "):
            tokens.read(0, 6)


# ------------------------------------------------------------------------------ token files


@pytest.fixture
def file(folder):
    texts = sorted(folder.glob("*.txt"))
    write_tokens(folder / "tokens.h5", texts, ByteTokenizer())
    return folder / "tokens.h5"


def everything(path):
    with open_tokens(path) as tokens:
        return tokens.vocabulary, tokens.read(0, len(tokens)).tolist()


def test_token_file_contains_the_tokens_and_attributes(file):
    assert everything(file) == (256, list(ROW))
    verify(file)
    with h5py.File(file) as raw:
        assert raw["tokens"].dtype == np.uint8 and raw["tokens"].shape == (len(ROW),)
        assert raw.attrs["format"] == b"hpc3d-tokens" and raw.attrs["version"] == 1
        assert raw.attrs["tokenizer"] == b"byte" and raw.attrs["vocabulary"] == 256
        assert raw.attrs["documents"] == 3 and raw.attrs["text_bytes"] == len(ROW) - 3
        assert raw.attrs["sources"].tolist() == [b"a.txt", b"b.txt", b"c.txt"]


def test_only_the_token_file_is_written(file):
    assert {path.name for path in file.parent.iterdir()} == TEXTS.keys() | {"tokens.h5"}


def test_truncated_token_file_is_rejected(file):
    whole = file.read_bytes()
    for size in {*range(0, len(whole), 101), *range(600), len(whole) - 1}:
        file.write_bytes(whole[:size])
        assert "truncated" in message(file)


@pytest.mark.slow
def test_flipped_bit_is_rejected_or_harmless(file):
    whole, good = file.read_bytes(), everything(file)
    outcomes = Counter()
    for place in (*range(0, 4096, 7), *range(4096, len(whole), 211)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            assert everything(file) == good
            outcomes["harmless"] += 1
        except ValueError as error:
            assert str(error).startswith("data.path: ")
            outcomes["refused"] += 1
    assert outcomes["refused"] > outcomes["harmless"]


def test_verify_detects_changed_tokens(file):
    with h5py.File(file, "r+") as raw:
        raw["tokens"][3] += 1
    everything(file)
    with pytest.raises(ValueError, match=r"\Adata\.path: .*SHA-256"):
        verify(file)


def change_length(raw):
    raw.attrs["length"] = len(ROW) + 1


def add_token(raw):
    raw["tokens"].resize((len(ROW) + 1,))


def newer(raw):
    raw.attrs["version"] = 2


def other_format(raw):
    raw.attrs["format"] = "hpc3d-trace"


def too_large_ids(raw):
    raw.attrs["vocabulary"] = 2**31 + 1


def replace(data, **options):
    def change(raw):
        del raw["tokens"]
        if data is not None:
            raw.create_dataset("tokens", data=data, **options)

    return change


def link(target):
    def change(raw):
        raw.move("tokens", "elsewhere")
        raw["tokens"] = target

    return change


def virtual(raw):
    layout = h5py.VirtualLayout((len(ROW),), np.uint8)
    layout[:] = h5py.VirtualSource("other.h5", "tokens", (len(ROW),))
    del raw["tokens"]
    raw.create_virtual_dataset("tokens", layout)


def drop(name):
    return lambda raw: raw.attrs.pop(name)


FOREIGN = {
    "length": (change_length, "21 tokens"),
    "longer": (add_token, "20 tokens"),
    "newer": (newer, "version 2"),
    "format": (other_format, "format hpc3d-trace"),
    "ids": (too_large_ids, "vocabulary 2147483649"),
    "none": (replace(None), "(tokens ... dataset"),
    "float": (replace(np.zeros(len(ROW))), "<f8"),
    "signed": (replace(np.zeros(len(ROW), np.int32)), "<i4"),
    "2-D": (replace(np.zeros((1, len(ROW)), np.uint8)), "shape (1, 20)"),
    "soft": (link(h5py.SoftLink("/elsewhere")), "(tokens ... dataset"),
    "external": (link(h5py.ExternalLink("other.h5", "/tokens")), "(tokens ... dataset"),
    "virtual": (virtual, "(tokens ... dataset"),
    "outside": (replace(np.zeros(20, np.uint8), external="/dev/zero"), "(tokens ... dataset"),
    "no format": (drop("format"), "format None"),
    "no version": (drop("version"), "version None"),
    "no vocabulary": (drop("vocabulary"), "attribute"),
    "no length": (drop("length"), "attribute"),
    "no sha256": (drop("sha256"), "attribute"),
}


@pytest.mark.parametrize(("change", "reason"), FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_file_is_rejected(file, change, reason):
    with h5py.File(file, "r+") as raw:
        change(raw)
    assert re.search(elided(reason), message(file))


def test_token_id_beyond_the_vocabulary_is_rejected(file):
    with h5py.File(file, "r+") as raw:
        raw.attrs["vocabulary"] = max(ROW)
    with open_tokens(file) as tokens:
        assert tokens.read(0, 5).tolist() == list(ROW[:5])
        with pytest.raises(ValueError, match=rf"\Adata\.path: .* {max(ROW)}\)"):
            tokens.read(0, len(ROW))


def test_tokenizer_must_match_the_configuration(file):
    assert re.search('data.tokenizer .* "bpe"; .* "byte"', message(file, "bpe"))


def test_token_file_records_its_tokenizer(file, folder):
    with h5py.File(file, "r+") as raw:
        raw.attrs["tokenizer"] = np.bytes_("bpe")
    with open_tokens(file) as tokens, open_tokens(folder) as texts, open_tokens(file, "bpe"):
        assert (tokens.tokenizer, texts.tokenizer) == ("bpe", "byte")
    assert re.search('"bpe" .* data.tokenizer .* "byte"; .* "bpe"', message(file))
