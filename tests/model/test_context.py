"""Assignment of tokens to the ranks of a context axis."""

import numpy as np
import pytest

from hpc3d.model.context import Context

CONTEXTS = [Context(24, *sizes) for sizes in ((1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (2, 3))]


def drawn(context):
    """Return the rank of every chunk of a sequence, as a text of 2 r u characters."""
    owner = np.empty(context.length, int)
    for part in range(context.parts):
        owner[context.positions(part)] = part
    return " ".join(map(str, owner[:: context.length // (2 * context.parts)]))


def test_chunks_are_assigned_in_zig_zag_order():
    assert drawn(Context(24, rings=2)) == "0 1 1 0"
    assert drawn(Context(24, rings=4)) == "0 1 2 3 3 2 1 0"
    assert drawn(Context(24, heads=3)) == "0 0 1 1 2 2"
    assert drawn(Context(24, rings=2, heads=2)) == "0 0 2 2 3 3 1 1"


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_every_token_is_on_exactly_one_rank(context):
    parts = [context.positions(part) for part in range(context.parts)]
    assert {len(part) for part in parts} == {context.tokens}
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(24))


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_rows_of_virtual_sequences_are_tokens_of_the_batch(context):
    """Tokens are numbered as the rows of the batch; the sequences 5 to 7 are used."""
    numbers = np.arange(8 * 24).reshape(8, 24)
    cut = context.cut(numbers[5:])
    assert cut.shape == (3 * context.parts, context.tokens)
    flat = cut.ravel()
    for here in (slice(0, 72), slice(7, 31), slice(40, 41)):
        np.testing.assert_array_equal(context.rows(here, len(cut), 5), flat[here])


@pytest.mark.parametrize("rings", [2, 3, 4])
def test_causal_work_is_equal_on_all_ring_ranks(rings):
    """A rank has 3 pairs of chunks in its own hop and 2 in each other hop; 2 r + 1 in total."""
    context = Context(24, rings)
    for place in range(rings):
        mine = context.chunks(place)
        seen = [
            sum(theirs <= ours for ours in mine for theirs in context.chunks(other))
            for other in range(rings)
        ]
        assert seen == [3 if other == place else 2 for other in range(rings)]
