"""What a prediction says of a mixture, against numbers by hand."""

from hpc3d.config.load import load
from hpc3d.config.rules import resolve
from hpc3d.predict.assumptions import lines, of_mixture

SMALL = (
    "--model.layers 5 --model.hidden 8 --model.heads 2 --model.sequence 6 --model.vocabulary 10"
)


def config_of(words):
    return resolve(load(None, words.split()), 1)


def test_a_dense_model_has_none():
    assert of_mixture(config_of(SMALL)) == {}
    assert lines(config_of(SMALL)) == []


def test_those_of_a_small_mixture():
    config = config_of(f"{SMALL} --model.experts 4 --model.top_k 2 --model.moe_every 2")
    expert = 8 * 8**2 + 5 * 8  # its matrices and biases
    dense, mixture = 12 * 8**2 + 13 * 8, 4 * 8**2 + 8 * 8 + 4 * 8 + 4 * expert
    total = 3 * dense + 2 * mixture + (10 + 6) * 8 + 2 * 8
    active = total - 2 * 2 * expert
    assert of_mixture(config) == {
        "parameters": total,
        "active": active,
        "blocks": 2,
        "slots": 4,  # of 6 x 2 x 1.25 / 4 = 3.75
        "capacity": 1.25,
    }
    parameters, experts, assumed, _ = lines(config)
    met = f"{total}, of which a token meets {active}: these count for FLOP and MFU"
    assert parameters == f"parameters      {met}"
    assert experts == "experts         4 in 2 of 5 blocks, top_k 2"
    assert assumed.startswith("assumed         capacity 1.25: 4 slots of each expert ")


def test_large_counts_are_short_and_there_may_be_room_for_all():
    words = "--model.experts 512 --model.hidden 4096 --model.capacity 0 --model.vocabulary 32000"
    parameters, _, assumed, _ = lines(config_of(words))
    assert parameters.startswith("parameters      137.7 G, of which a token meets 538.3 M: ")
    assert assumed.startswith("assumed         room for all: 64 slots ")
