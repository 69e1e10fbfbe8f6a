"""What is said of a mixture before a prediction."""

from dataclasses import replace

from hpc3d.config.load import load
from hpc3d.predict.assumptions import lines, of_mixture


def settled(*options):
    config = load("moe-gshard-64", options)
    return replace(config, model=replace(config.model, vocabulary=256))


def test_the_numbers_of_a_mixture():
    """Of 4 blocks of 192 columns the second and the fourth have 8 experts, of which two see a
    token; C = 2 x 64 x 1.25 / 8."""
    attention, mlp, norms = 4 * 192 * 193, 192 * 768 * 2 + 960, 4 * 192
    mixture, ends = 192 * 8, (256 + 64) * 192 + 2 * 192
    found = of_mixture(settled())
    rest = 4 * (attention + norms) + 2 * (mlp + mixture) + ends
    assert found["parameters"] == rest + 2 * 8 * mlp
    assert found["active"] == rest + 2 * 2 * mlp
    assert (found["blocks"], found["slots"], found["capacity"]) == (2, 20, 1.25)


def test_room_for_all_is_said():
    text = "\n".join(lines(settled("--model.capacity", "0")))
    assert "room for all: 64 slots of each expert for a sequence of 64" in text
    text = "\n".join(lines(settled("--model.capacity", "0.05")))
    assert "capacity 0.05: 1 slot of each expert" in text


def test_of_a_dense_model_nothing_is():
    dense = load("gpt-3d-64", [])
    assert of_mixture(dense) == {} and lines(dense) == []
