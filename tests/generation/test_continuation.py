"""Generation with a key-value cache matches full forward passes on every layout."""

from math import prod

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.generation.continuation import TextRequest, continue_text
from hpc3d.generation.sampling import Sampling
from hpc3d.model.decoder import sequences_for
from tests.model.test_decoder import (
    COMMON,
    KINDS,
    MESHES,
    MIXTURES,
    SEQUENCE,
    decoder_of,
    forward_of,
)
from tests.pipeline.mixes import config_of
from tests.strided import strided

PROMPT = np.array([3, 1, 4, 1, 5])
TOKENS = 11  # more than there are positions
HOW = Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=3)


def by_whole_passes(line, prompt, samples, tokens, how=HOW):
    """Return the samples computed without a cache, with a separately computed window."""
    logits, found = forward_of(line), []
    for sample in range(samples):
        text, seen = [*prompt], min(len(prompt), SEQUENCE)
        for number in range(tokens):
            if seen > SEQUENCE:
                seen = SEQUENCE // 2
            row = logits(np.array([text[-seen:]]))[0, -1]
            text.append(how.draw(row, sample, number))
            seen += 1
        found.append(text[len(prompt) :])
    return found


def continued(line, prompt, samples, tokens, how=HOW):
    """Return the samples drawn by rank 0 of a mix; all ranks must end together."""
    config = config_of(line)

    def rank(mesh):
        split, mixes = config.splits["dense"], config.model.experts > 0
        sequences = sequences_for(mesh.sizes, split, samples, mixes)
        ended = prompt[-1] == config.data.document_end()
        wanted = TextRequest(prompt, samples, sequences, tokens, ended)
        decoder, found = decoder_of(mesh, config, wanted.capacity(SEQUENCE)), []

        def choose(logits, number):
            assert mesh.rank == 0 and logits.shape[0] == samples
            found.append([how.draw(row, sample, number) for sample, row in enumerate(logits)])
            return found[-1]

        continue_text(decoder, wanted, choose)
        return found

    first, *others = run(config.sizes(), rank)
    assert not any(others)
    return [[*column] for column in zip(*first, strict=True)]


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[2:], *MIXTURES])
def test_cached_generation_matches_full_forward_passes(kind):
    line = f"{COMMON} {kind}"
    assert continued(line, PROMPT, 2, TOKENS) == by_whole_passes(line, PROMPT, 2, TOKENS)


@pytest.mark.parametrize("size", [1, SEQUENCE, SEQUENCE + 4])
def test_prompt_may_have_any_length(size):
    prompt = np.arange(size) % 29
    found = continued(COMMON, prompt, 1, 7)
    assert found == by_whole_passes(COMMON, prompt, 1, 7)


@pytest.mark.parametrize("prompt", [[3, 1, 4], [3, 1, 5]])
def test_new_document_does_not_attend_to_the_prompt(prompt):
    """The reference attends within documents, which end with token 4."""
    line = f"{COMMON} boundaries=true separator=4"
    found = continued(line, np.array(prompt), 2, 5)
    assert found == by_whole_passes(line, prompt, 2, 5) and 4 not in np.array(found)
    assert (found == by_whole_passes(COMMON, prompt, 2, 5)) == (prompt[-1] != 4)


@pytest.mark.parametrize("mesh", strided(MESHES, 12))
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
@pytest.mark.parametrize("samples", [1, 3])
def test_generated_text_is_the_same_on_every_layout(mesh, kind, samples):
    line = f"{COMMON} {kind}"
    expected = continued(line, PROMPT, samples, TOKENS)
    assert len({*map(tuple, expected)}) == samples
    assert continued(f"{line} {mesh}", PROMPT, samples, TOKENS) == expected


@pytest.mark.parametrize("mesh", ["x=4 scheme=1d", "x=2 y=2 scheme=2d-summa", "x=2 y=2 z=2"])
def test_generated_text_of_experts_is_the_same_on_every_layout(mesh):
    test_generated_text_is_the_same_on_every_layout(mesh, MIXTURES[1], 3)


def test_greedy_sampling_selects_the_largest_logits():
    greedy = Sampling(temperature=0)
    found = continued(f"{COMMON} x=2 y=2 z=2", PROMPT, 1, 6, greedy)
    assert found == by_whole_passes(COMMON, PROMPT, 1, 6, greedy)


def test_all_ranks_stop_when_rank_0_stops():
    config = config_of(f"{COMMON} x=2 y=2 z=2")

    def rank(mesh):
        decoder, calls = decoder_of(mesh, config), []

        def choose(logits, number):
            calls.append(number)
            return None if number == 2 else [5]

        continue_text(decoder, TextRequest(PROMPT, 1, 8, 99), choose)
        return calls, decoder.kept.length

    found = run(config.sizes(), rank)
    assert prod(config.sizes().values()) == len(found) == 8
    assert found[0] == ([0, 1, 2], len(PROMPT) + 2)
    assert found[1:] == 7 * [([], len(PROMPT) + 2)]


def test_cache_capacity_is_limited_to_prompt_and_new_tokens():
    assert TextRequest(PROMPT, 1, 1, 3).capacity(100) == 8
    assert TextRequest(PROMPT, 1, 1, 300).capacity(100) == 100
