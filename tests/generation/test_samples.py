"""Rank 0 samples tokens from logits, prints texts, and ends the generation."""

import numpy as np
import pytest

from hpc3d.data.tokenizer import ByteTokenizer
from hpc3d.generation.samples import Samples
from hpc3d.generation.sampling import Sampling
from hpc3d.generation.trained_model import TrainedModel
from tests.pipeline.mixes import config_of

GREEDY = Sampling(temperature=0)


def logits(*rows):
    """Return logits whose maximum in each row is the given token."""
    found = np.zeros((len(rows), 300))
    found[range(len(rows)), [*rows]] = 1
    return found


@pytest.fixture
def written():
    return []


@pytest.fixture
def samples(written):
    """Factory of samples of a byte model; texts end with NUL."""
    config = config_of("schedule=none microbatches=1 vocabulary=300")
    model = TrainedModel(config, ByteTokenizer(), None, frozenset({0}), 0)

    def make(count=1, stopping=lambda: False):
        return Samples(model, GREEDY, count, written.append, stopping)

    return make


def test_text_of_one_sample_is_streamed_token_by_token(samples, written):
    one = samples()
    for number, token in enumerate(b"a\xc3\xa9"):
        assert one.choose(logits(token), number) == [token]
    assert [*filter(None, written)] == ["a", "é"]
    one.finish("prompt ")
    assert written[-1] == "\n"
    assert one.results() == [{"text": "aé", "tokens": [*b"a\xc3\xa9"], "ended": False}]
    assert one.reason == "tokens"


def test_incomplete_character_is_flushed_at_the_end(samples, written):
    one = samples()
    one.choose(logits(0xC3), 0)
    one.finish("")
    assert "".join(written) == "\ufffd\n"


def test_generation_ends_with_the_last_sample(samples, written):
    two = samples(2)
    assert two.choose(logits(*b"ab"), 0) == [*b"ab"]
    assert two.choose(logits(0, ord("c")), 1) == [0, ord("c")]
    assert two.choose(logits(*b"xd"), 2) is not None  # nobody sees the x
    assert two.choose(logits(ord("x"), 0), 3) is None
    assert [each["text"] for each in two.results()] == ["a", "bcd"]
    assert two.reason == "end of text" and not written
    two.finish("> ")
    assert "".join(written) == "=== 1 of 2\n> a\n=== 2 of 2\n> bcd\n"


def test_tokens_without_text_are_not_sampled(samples):
    row = logits(299)
    row[0, 7] = 0.5
    assert samples().choose(row, 0) == [7]


def test_user_can_stop_generation(samples):
    wanted = [False, True]
    one = samples(stopping=lambda: wanted.pop(0))
    assert one.choose(logits(5), 0) == [5]
    assert one.choose(logits(5), 1) is None
    assert one.reason == "user" and one.results()[0]["tokens"] == [5]
