"""Documents in a new random order in each epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.config.input_file import Config, DataConfig, ModelConfig, TrainConfig
from hpc3d.data.documents import ShuffledDocuments, refuse_other_end
from hpc3d.data.mixture import Mixture
from hpc3d.data.token_file import Tokens
from hpc3d.training.masking import batches_of

END = 0


class _Row(Tokens):
    """Token source with the given ids, of the byte tokenizer."""

    tokenizer, json, vocabulary = "byte", "{}", 256

    def __init__(self, ids):
        self.ids = np.array(ids, np.int32)
        self.sha256, self.digests = str(ids), frozenset()

    def __len__(self):
        return len(self.ids)

    def read(self, start, stop):
        assert 0 <= start <= stop <= len(self.ids)
        return self.ids[start:stop]


def text(lengths, rest=0):
    """Return documents of the given lengths, each with one id, and tokens without an end."""
    ids = [each for n, length in enumerate(lengths, 1) for each in [n] * length + [END]]
    return _Row(ids + [255] * rest)


def documents(ids):
    """Split ids after each end token."""
    return [each.tolist() for each in np.split(ids, np.flatnonzero(ids == END) + 1) if len(each)]


@pytest.mark.parametrize(("own", "separator", "trained", "count", "found"), [
    (0, 0, 0, 1, None),
    (0, 0, 0, None, None),  # unknown number of documents
    (0, 0, 0, 0, "contains no token 0"),
    (0, 2, 2, 1, "has the end-of-document token 0 (zero)"),
    (0, 2, 0, 1, None),  # the user chose a token of the text
    (0, 2, None, 1, None),
    (0, 9, None, 1, "has the end-of-document token 0 (zero)"),
    (None, 2, 2, 0, None),
    (None, 9, 9, 0, "contains no token 9"),
])  # fmt: skip
def test_text_whose_documents_end_with_another_token_is_rejected(
    own, separator, trained, count, found
):
    row = text([1, 1])  # 1 0 2 0
    row.path, row.end_name, row.documents, row.end = "a.h5", "zero", count, lambda: own
    if found is None:
        refuse_other_end(row, separator, trained)
        return
    with pytest.raises(ValueError, match=r"^data.path: .* --end TOKEN\)$") as refused:
        refuse_other_end(row, separator, trained)
    line = f"a.h5 {found}, but documents end with token {separator} (data.separator); use a text"
    assert line in str(refused.value)


def test_separator_is_found_in_any_piece_of_a_text(monkeypatch):
    monkeypatch.setattr("hpc3d.data.documents.PIECE", 2)
    for separator in (1, 2, 3):
        refuse_other_end(text([1, 1, 1]), separator)


drawn = st.lists(st.integers(0, 6), max_size=9)


@given(drawn, st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_each_epoch_has_every_document_once(lengths, rest, seed):
    row = text(lengths, rest)
    shuffled = ShuffledDocuments(row, END, seed)
    for epoch in (0, 3, 0):
        found = documents(shuffled.read(epoch, 0, len(row)))
        assert sorted(found) == sorted(documents(row.ids)) and found[-1] == [255] * rest


@given(drawn, st.integers(0, 5))
def test_any_range_is_a_slice_of_the_epoch(lengths, epoch):
    row = text(lengths, 2)
    shuffled = ShuffledDocuments(row, END, 7)
    whole = shuffled.read(epoch, 0, len(row)).tolist()
    for start in range(len(row)):
        for stop in range(start + 1, len(row) + 1):
            assert shuffled.read(epoch, start, stop).tolist() == whole[start:stop]


def test_order_differs_by_epoch_and_seed_and_is_stable():
    row = text([1] * 8)
    orders = {
        tuple(ShuffledDocuments(row, END, seed).read(epoch, 0, 16)[::2].tolist())
        for seed in (0, 1234)
        for epoch in (0, 1)
    }
    assert len(orders) == 4 and (4, 1, 5, 6, 2, 8, 3, 7) in orders


def batches(parts, shuffle):
    tokens = Mixture(parts, [2, 1]) if len(parts) > 1 else parts[0]
    config = Config(
        model=ModelConfig(sequence=5, vocabulary=256),
        train=TrainConfig(batch=4),
        data=DataConfig(shuffle=shuffle),
    )
    return batches_of(config, tokens)


def test_batches_are_windows_of_the_shuffled_documents_and_resume_exactly():
    parts = [text(range(1, 12)), text(range(9, 2, -1))]
    found = batches(parts, "documents")
    rows = np.concatenate([found.batch(step)[0] for step in range(20)])
    resumed = batches(parts, "documents")
    resumed.go_on(13, found.position(13)["sequences"], found.position(13))
    assert np.array_equal(resumed.batch(13)[0], rows[52:56])
    single = batches(parts[:1], "documents")
    windows = (len(parts[0]) - 1) // 5
    shuffled = ShuffledDocuments(parts[0], END, Config().seed)
    for epoch in (0, 1):
        numbers = range(epoch * windows, (epoch + 1) * windows)
        seen = sorted(single.batch(n // 4)[0][n % 4].tolist() for n in numbers)
        whole = shuffled.read(epoch, 0, 5 * windows).reshape(windows, 5)
        assert seen == sorted(whole.tolist())


def test_text_without_a_known_end_of_documents_is_rejected(monkeypatch):
    monkeypatch.setattr(_Row, "end", lambda self: None)
    with pytest.raises(ValueError, match=r"\Adata\.shuffle = documents: .* --end TOKEN"):
        batches([text([9, 9])], "documents")
