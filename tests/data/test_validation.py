"""Validation data: the held-out text, the windows that are read, and rejected settings."""

import re
from dataclasses import replace

import numpy as np
import pytest

from hpc3d.config.input_file import Config
from hpc3d.data.batches import IGNORE, Batches
from hpc3d.data.token_file import open_tokens, write_tokens
from hpc3d.data.tokenizer import ByteTokenizer
from hpc3d.data.validation import (
    TokenRange,
    ValidationBatches,
    divided,
    separate_texts,
    text_names,
)
from hpc3d.training.masking import validations_of
from tests.data.test_batches import Numbers


def test_held_out_tokens_are_the_last_and_are_never_trained_on():
    trained, (held,) = divided(Numbers(1000), 0.1)
    assert (len(trained), len(held)) == (900, 100)
    assert held.read(0, 100).tolist() == [*range(900, 1000)]
    batches = Batches(trained, 4, 25, 7)
    seen = {token for step in range(20) for part in batches.batch(step) for token in part.flat}
    assert (min(seen), max(seen)) == (0, 896)


@pytest.mark.parametrize("nothing", [None, "", "other.txt"])
def test_all_tokens_are_trained_on_without_held_out_text(nothing):
    tokens = Numbers(10)
    assert divided(tokens, nothing) == (tokens, [])


def windows_of(batches):
    """Return (inputs, targets) of every sequence with a target."""
    rows = [row for number in range(batches.count) for row in zip(*batches.batch(number))]
    return [row for row in rows if (row[1] != IGNORE).any()]


@pytest.mark.parametrize(("length", "batch", "most", "count"), [
    (41, 4, 0, 3),  # 10 windows, the last batch has 2
    (41, 4, 2, 2),
    (41, 4, 9, 3),
    (44, 5, 0, 2),  # 10 windows and a rest
    (5, 3, 16, 1),
])  # fmt: skip
def test_each_validation_window_is_read_once_and_padding_is_ignored(length, batch, most, count):
    batches = ValidationBatches(Numbers(length), 4, batch, most)
    assert batches.count == count
    assert all(part.shape == (batch, 4) for n in range(count) for part in batches.batch(n))
    found = windows_of(batches)
    assert all(np.array_equal(targets, inputs + 1) for inputs, targets in found)
    starts = sorted(int(inputs[0]) for inputs, _ in found)
    every = [window * 4 for window in range((length - 1) // 4)]
    assert starts == every if len(every) <= batch * count else len({*starts}) == batch * count


@pytest.mark.parametrize(("length", "batch"), [(41, 4), (44, 5), (42, 4), (3, 2), (2, 1)])
def test_each_token_is_a_target_once_with_the_remainder(length, batch):
    batches = ValidationBatches(Numbers(length), 4, batch, 0, remainder=True)
    pairs = [pair for number in range(batches.count) for pair in [batches.batch(number)]]
    inputs, targets = (np.concatenate(each) for each in zip(*pairs))
    valid = targets != IGNORE
    assert sorted(targets[valid].tolist()) == [*range(1, length)]
    assert np.array_equal(inputs[valid] + 1, targets[valid])
    assert (valid[:, :-1] >= valid[:, 1:]).all()  # the padding is at the end of a window
    assert len(targets) == -(-(length - 1) // (4 * batch)) * batch


@pytest.mark.parametrize(("most", "targets"), [(0, 41), (9, 40)])
def test_complete_text_of_a_run_includes_an_incomplete_window(most, targets):
    config = Config()
    model = replace(config.model, sequence=4, vocabulary=256)
    config = replace(config, model=model, train=replace(config.train, batch=3, eval_batches=most))
    (batches,) = validations_of(config, [Numbers(42)])
    found = [batches.batch(number)[1] for number in range(batches.count)]
    assert sum((each != IGNORE).sum() for each in found) == targets


def test_evaluations_read_the_same_sample_of_windows():
    first, again = (ValidationBatches(Numbers(4001), 4, 10, 5) for _ in range(2))
    starts = [int(inputs[0]) for inputs, _ in windows_of(first)]
    assert starts == [int(inputs[0]) for inputs, _ in windows_of(again)]
    assert len({*starts}) == 50 and min(starts) < 1000 and max(starts) > 3000


def refused(function, *given, key=""):
    with pytest.raises(ValueError, match=rf"\Adata\.validation{key}: ") as caught:
        function(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_validation_text_shorter_than_a_window_is_rejected():
    line = refused(ValidationBatches, TokenRange(Numbers(100), 96, 100), 4, 2, 0)
    assert "4 tokens" in line and "at least 5" in line
    assert "1 token, " in refused(ValidationBatches, Numbers(1), 4, 2, 0, True)


def test_separate_validation_text(tmp_path, text):
    (tmp_path / "other.txt").write_text("held")
    tokens = open_tokens(text)
    (held,) = separate_texts([str(tmp_path / "other.txt")], tokens)
    assert bytes(held.read(0, 5).tolist()) == b"held\0"
    assert held.made_by() == tokens.made_by()
    (tmp_path / "other.txt").write_text("x")
    assert "was truncated" in refused(held.read, 0, 5)


def test_closing_the_validation_text_closes_its_file(tmp_path, text):
    write_tokens(tmp_path / "tokens.h5", [text], ByteTokenizer())
    (held,) = separate_texts([tmp_path / "tokens.h5"], open_tokens(text))
    with held:
        held.read(0, 5)
    assert "not a readable token file" in refused(held.read, 0, 5)


def test_unreadable_validation_text_error_names_its_key(tmp_path, text):
    tokens = open_tokens(text)
    assert "does not exist" in refused(separate_texts, [tmp_path / "none.txt"], tokens)
    line = refused(separate_texts, ["a.h5,b.h5"], tokens)
    assert line.endswith('a.h5,b.h5 does not exist; set several texts as \'["a.h5", "b.h5"]\'')
    (tmp_path / "bad.h5").write_bytes(b"no tokens")
    assert "not a readable token file" in refused(separate_texts, [tmp_path / "bad.h5"], tokens)


def test_error_names_the_entry_of_a_list_of_validation_texts(tmp_path, text):
    for name, content in (("a.txt", "first"), ("b.txt", "other"), ("c.txt", "first")):
        (tmp_path / name).write_text(content)
    tokens, paths = open_tokens(text), [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    one, two = separate_texts(paths[:2], tokens)
    assert [bytes(each.read(0, 6).tolist()) for each in (one, two)] == [b"first\0", b"other\0"]
    line = refused(separate_texts, paths, tokens, key=r"\[2\]")
    assert "c.txt has the same tokens as data.validation[0]" in line
    assert "does not exist" in refused(
        separate_texts, [*paths[:2], tmp_path / "none.txt"], tokens, key=r"\[2\]"
    )
    config = replace(Config(), model=replace(Config().model, sequence=6, vocabulary=256))
    (tmp_path / "d.txt").write_text("a longer text")
    held = separate_texts([tmp_path / "d.txt", paths[0]], tokens)
    assert "6 tokens" in refused(validations_of, config, held, key=r"\[1\]")
    assert len(validations_of(config, held[:1])) == 1


@pytest.mark.parametrize(("paths", "names"), [
    ((), []),
    (("a/held.txt",), ["held.txt"]),
    (("/data/web.h5", "code.h5"), ["web.h5", "code.h5"]),
    (("/web/val.h5", "/code/val.h5", "x.txt"), ["web/val.h5", "code/val.h5", "x.txt"]),
])  # fmt: skip
def test_names_of_texts_are_short_and_distinct(paths, names):
    assert text_names(paths) == names


def test_validation_tokens_of_another_tokenizer_are_rejected(tmp_path, text, bpe):
    def prepared(name, tokenizer):
        write_tokens(tmp_path / name, [text], tokenizer)
        return str(tmp_path / name)

    byte, learned = prepared("byte.h5", ByteTokenizer()), prepared("bpe.h5", bpe)
    bytes_of, learned_of = open_tokens(byte), open_tokens(learned)
    assert len(separate_texts([byte], open_tokens(text))[0]) == len(bytes_of)
    for tokens, path in ((bytes_of, learned), (learned_of, byte), (learned_of, str(text))):
        line = refused(separate_texts, [path], tokens)
        assert re.search(
            rf"of {path} .* differs from that of {tokens.path} .* --tokenizer {tokens.path}$", line
        )
    learned_of.json += " "  # the same name and vocabulary, other merges
    assert "the tokenizer of" in refused(separate_texts, [learned], learned_of)
