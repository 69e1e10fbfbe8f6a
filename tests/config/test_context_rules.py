"""Settings of context parallelism that are rejected."""

import re
from math import prod

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems
from tests.elided import elided

# [parallel], [mesh] and [model] as options, and the line.
WRONG = {
    "--mesh.c 2 --model.sequence 5": "model.sequence = 5 ... mesh.c = 2 x 2 chunks; ... 4 or 8",
    "--mesh.c 8 --model.sequence 12": "model.sequence = 12 ... mesh.c = 8 x 2 chunks; ... 16",
    "--mesh.c 2 --model.sequence 9 --parallel.context all-to-all": (
        "model.sequence = 9 ... mesh.c = 2; ... 8 or 10"
    ),
    "--mesh.c 2 --parallel.ulysses 2": "parallel.ulysses = 2: ... parallel.context = both; ...",
    "--mesh.c 8 --parallel.context both --parallel.ulysses 3": (
        "parallel.ulysses = 3 ... mesh.c = 8, ... 2 or 4"
    ),
    "--mesh.c 2 --parallel.context both": (
        'parallel.ulysses = 1 ... mesh.c = 2, ... context = "ring"'
    ),
    "--mesh.c 2 --parallel.attention full": "parallel.attention = full: ...mesh.c = 2",
    "--mesh.c 4 --mesh.y 2 --model.heads 12 --parallel.context all-to-all": (
        "model.heads = 12: ... (6) ... 4 ... multiple of 8"
    ),
    "--mesh.c 4 --model.kind llama --model.heads 12 --model.hidden 96 --model.kv_heads 3"
    " --parallel.context all-to-all": (
        "model.kv_heads = 3: ... (3) ... 4 ... multiple of 4, or a divisor of 4 ..."
    ),
}


def ranks_of(words):
    mesh = dict(zip(words[::2], words[1::2]))
    return prod(int(size) for key, size in mesh.items() if key.startswith("--mesh."))


@pytest.mark.parametrize("words", WRONG)
def test_invalid_context_settings_are_rejected(words):
    options = words.split()
    (line,) = problems(*options, ranks=ranks_of(options))
    assert re.match(elided(WRONG[words]), line)


@pytest.mark.parametrize(
    ("words", "cut"),
    [
        ("--mesh.c 4", (64, 4, 1)),
        ("--mesh.c 4 --parallel.context all-to-all", (64, 1, 4)),
        ("--mesh.c 4 --parallel.context both --parallel.ulysses 2", (64, 2, 2)),
        ("--parallel.context all-to-all", (64, 1, 1)),
    ],
)
def test_context_split_of_a_sequence(words, cut):
    options = words.split()
    assert resolve(load(None, options), ranks_of(options)).context() == cut


@pytest.mark.parametrize(
    ("words", "chunked"),
    [
        ("", False),
        ("--parallel.attention chunked", True),
        ("--mesh.c 2", True),
        ("--mesh.c 2 --parallel.context all-to-all", False),
        ("--model.sequence 1023", False),
        ("--model.sequence 1024", True),
        ("--model.sequence 1024 --parallel.attention full", False),
        ("--model.sequence 1024 --train.backend cupy", False),
        ("--model.sequence 1024 --train.dtype float64", True),
        ("--model.sequence 1024 --train.dtype bfloat16", False),
    ],
)
def test_chunked_attention_is_selected_by_context_and_sequence_length(words, chunked):
    assert load(None, words.split()).chunked() is chunked
