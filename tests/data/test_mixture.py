"""Batches from several texts, which alternate in the ratio of their weights."""

from collections import Counter

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.data.batches import Batches
from hpc3d.data.mixture import Mixture, open_texts
from hpc3d.data.token_file import Tokens, open_tokens, write_tokens
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer
from hpc3d.data.validation import ValidationBatches, divided
from tests.data.test_batches import starts

FAR = 1000  # tokens from the first token of a text to that of the next


class _Marked(Tokens):
    """Text whose token i is FAR * `text` + i, so that a window shows its text and position."""

    tokenizer, json, vocabulary = "marked", "{}", 10 * FAR

    def __init__(self, text, length):
        self.text, self.length, self.sha256 = text, length, f"{text}"
        self.digests = frozenset(self.sha256)

    def __len__(self):
        return self.length

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.length
        return np.arange(start, stop, dtype=np.int32) + FAR * self.text


def mixture(texts, weights):
    """Mix texts given as {number: windows of 3 tokens}."""
    return Mixture([_Marked(text, 3 * count + 1) for text, count in texts.items()], weights)


def by_text(order, text):
    return [start % FAR for start in order if start // FAR == text]


drawn = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=2, max_size=4)


@given(drawn, st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_each_text_is_read_as_without_the_others_in_the_ratio_of_the_weights(parts, batch, seed):
    windows, weights = zip(*parts, strict=True)
    mixed = mixture(dict(enumerate(windows)), weights)
    rounds = 3 * max(windows)
    steps = range(-(-rounds * sum(weights) // batch))
    order = starts(Batches(mixed, 3, batch, seed), steps)
    for begin in range(0, rounds * sum(weights), sum(weights)):
        found = Counter(start // FAR for start in order[begin : begin + sum(weights)])
        assert found == dict(enumerate(weights))
    for text, part in enumerate(mixed.parts()):
        found = by_text(order, text)
        alone = starts(Batches(part, 3, 1, seed), range(len(found)))
        assert found == [start % FAR for start in alone]


def test_rounds_have_different_orders_that_depend_on_the_seed():
    orders = set()
    for seed in (0, 1):
        batches = Batches(mixture({0: 9, 1: 9}, [9, 11]), 3, 20, seed)
        orders |= {tuple(start // FAR for start in starts(batches, [step])) for step in (0, 1)}
    assert len(orders) == 4


def test_order_of_a_mixture_is_stable_across_numpy_versions():
    order = starts(Batches(mixture({0: 3, 1: 2}, [2, 1]), 3, 9, 1234), [0])
    assert order == [1003, 3, 6, 0, 3, 1000, 0, 6, 1000]


@given(drawn, st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_resumed_run_continues_every_text_exactly(parts, before, after, done):
    windows, weights = zip(*parts, strict=True)
    mixed = mixture(dict(enumerate(windows)), weights)
    first = Batches(mixed, 3, before, 5)
    position = first.position(done)
    resumed = Batches(mixed, 3, after, 5)
    resumed.go_on(done, position["sequences"], position)
    assert resumed.position(done) == position
    assert resumed.epochs(done) == first.epochs(done)
    one = starts(Batches(mixed, 3, 1, 5), range(done * before, done * before + 4 * after))
    assert starts(resumed, range(done, done + 4)) == one


def test_other_weights_texts_and_order_continue_each_text_where_it_ended():
    position = Batches(mixture({0: 40, 1: 50}, [3, 1]), 3, 4, 5).position(3)
    assert position == {"sequences": 12, "sequences of 0": 9, "sequences of 1": 3}
    order = []
    for step in (3, 5):  # the second resumed run has the same mixture as the first
        batches = Batches(mixture({2: 30, 1: 50, 0: 40}, [1, 2, 1]), 3, 4, 5)
        batches.go_on(step, 4 * step, position)
        order += starts(batches, range(step, step + 2))
        position = batches.position(step + 2)
    for text, windows, begun, count in ((0, 40, 9, 4), (1, 50, 3, 8), (2, 30, 0, 4)):
        alone = Batches(_Marked(text, 3 * windows + 1), 3, 1, 5)
        expected = starts(alone, range(begun, begun + count))
        assert by_text(order, text) == [start % FAR for start in expected]


def test_single_text_continues_in_a_mixture_and_back():
    single = _Marked(0, 3 * 40 + 1)
    mixed = Batches(mixture({0: 40, 1: 50}, [1, 1]), 3, 2, 5)
    mixed.go_on(7, 14, {"sequences": 14, "sequences of 0": 14})
    assert mixed.epochs(7) == [14 / 40, 0]
    order = starts(mixed, range(7, 10))
    back = Batches(single, 3, 1, 5)
    back.go_on(20, 20, mixed.position(10))
    order += starts(back, range(20, 22))
    assert by_text(order, 0) == starts(Batches(single, 3, 1, 5), range(14, 19))


def test_mixture_is_read_as_the_concatenation_of_its_texts():
    mixed = mixture({0: 2, 1: 1, 2: 3}, [1, 1, 1])
    row = np.concatenate([part.read(0, len(part)) for part in mixed.parts()])
    for start in range(len(row) + 1):
        for stop in range(start, len(row) + 1):
            assert mixed.read(start, stop).tolist() == row[start:stop].tolist()


def test_fraction_is_held_out_at_the_end_of_each_text():
    trained, (held,) = divided(mixture({0: 33, 1: 66}, [2, 1]), 0.1)
    assert [len(part) for part in trained.parts()] == [90, 180]
    order = starts(Batches(trained, 3, 30, 0), range(9))
    assert max(by_text(order, 0)) + 3 < 90 and max(by_text(order, 1)) + 3 < 180
    tokens, _ = ValidationBatches(held, 3, 10, 0).batch(0)
    assert {*tokens.ravel().tolist()} >= {*range(90, 99), *range(FAR + 180, FAR + 197)}


def test_too_short_part_is_rejected():
    with pytest.raises(ValueError, match=r"\Adata\.path\[1\]: 7 tokens, but model\.sequence = 8"):
        Batches(mixture({0: 5, 1: 2}, [1, 1]), 8, 1, 0)


@pytest.fixture
def files(tmp_path):
    for name, text in (("a.txt", b"first"), ("b.txt", b"second"), ("c.txt", b"first")):
        (tmp_path / name).write_bytes(text)
    return tmp_path


def test_text_listed_twice_is_rejected(files):
    with pytest.raises(ValueError, match=r"\Adata\.path: .*c\.txt .*a\.txt; .*data\.weights"):
        open_texts([files / "a.txt", files / "b.txt", files / "c.txt"], [1, 1, 1])
    for paths in ([files / "b.txt", files], [files, files / "b.txt"]):
        with pytest.raises(ValueError, match=r"\Adata\.path: .*b\.txt is listed twice; specify"):
            open_texts(paths, [1, 1])


def test_list_without_brackets_is_rejected_with_a_hint():
    with pytest.raises(ValueError, match=r"""a\.h5,b\.h5 does .* as '\["a\.h5", "b\.h5"\]'"""):
        open_texts(["a.h5,b.h5"], [1])


def test_texts_with_different_tokenizers_are_rejected(files, bpe):
    write_tokens(files / "b.h5", [files / "b.txt"], bpe)
    for first, second, fix in (("a.txt", "b.h5", "byte"), ("b.h5", "a.txt", files / "b.h5")):
        match = rf"\Adata\.path: .*tokenizer of .*{second} .*{first} .*; .*--tokenizer {fix}\Z"
        with pytest.raises(ValueError, match=match):
            open_texts([files / first, files / second], [2, 1])


def test_text_and_token_file_with_bytes_are_mixed(files):
    """Also tests token files of earlier versions, which do not name their end token."""
    paths = [files / "b.h5", files / "a.txt"]
    write_tokens(paths[0], [files / "b.txt"], ByteTokenizer())
    for _ in range(2):
        with open_texts(paths, [1, 1]) as mixed, open_texts(paths[::-1], [1, 1]) as turned:
            assert bytes(mixed.read(0, len(mixed)).tolist()) == b"second\0first\0"
            assert mixed.end() == turned.end() == 0
        with h5py.File(paths[0], "r+") as raw:
            raw.attrs.pop("tokenizer_end", None)


def test_texts_with_different_end_tokens_are_rejected(files, bpe):
    end = next(token for token in "abc" if bpe.id_of(token))
    write_tokens(files / "a.h5", [files / "a.txt"], bpe)
    write_tokens(files / "b.h5", [files / "b.txt"], BpeTokenizer(bpe.json, end))
    match = rf"\Adata\.path: .*end-of-document token of .*b\.h5 \({end}\) .*a\.h5 .*same --end"
    with pytest.raises(ValueError, match=match):
        open_texts([files / "a.h5", files / "b.h5"], [1, 1])


def test_opened_mixture_has_the_tokens_weights_and_tokenizer(files):
    paths = [files / "a.txt", files / "b.txt"]
    with open_texts(paths, [1, 2]) as mixed, open_texts(paths[:1], [3]) as one:
        assert mixed.weights == (1, 2) and len(one.parts()) == 1
        assert bytes(mixed.read(0, len(mixed)).tolist()) == b"first\0second\0"
        with open_tokens(paths[1]) as second:
            assert mixed.made_by() == second.made_by() and second.sha256 in mixed.digests
