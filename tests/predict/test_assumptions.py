"""Assumptions of predictions about mixtures, and published mixtures on a published machine."""

import json
from dataclasses import replace

import pytest

from hpc3d.config.input_file import Config
from hpc3d.config.load import load
from hpc3d.model.families import expert_parameters
from hpc3d.predict.assumptions import lines, of_mixture
from hpc3d.simulate import main

# 2 of 4 blocks, two matrices each of 4 experts; a token meets 2 of them.
MIXTURE = "layers=4 hidden=8 heads=2 sequence=16 vocabulary=32 experts=4 top_k=2 moe_every=2"
EXPERT = 2 * 4 * 8**2 + 4 * 8 + 8  # weights and biases


def model_of(line):
    words = [word.split("=") for word in line.split()]
    return load(None, [word for key, value in words for word in (f"--model.{key}", value)])


def test_parameters_and_slots_of_a_mixture():
    config = model_of(MIXTURE)
    found, unlimited = of_mixture(config), of_mixture(model_of(f"{MIXTURE} capacity=0"))
    assert found["parameters"] - found["active"] == 2 * (4 - 2) * EXPERT
    assert (found["blocks"], found["slots"], found["capacity"]) == (2, 10, 1.25)
    rows = config.train.batch * 16
    assert (unlimited["group"], unlimited["slots"]) == (rows, 5 * rows // 8)


def test_dense_model_has_no_assumptions():
    config = Config()
    config = replace(config, model=replace(config.model, vocabulary=256))
    assert of_mixture(config) == {} and lines(config) == []


def test_assumption_about_documents_is_listed():
    dense = replace(Config(), data=replace(Config().data, boundaries=True))
    mixture = replace(model_of(MIXTURE), data=dense.data)
    assert "documents of any length" in lines(dense)[0] and len(lines(dense)) == 2
    assert lines(mixture) == [*lines(model_of(MIXTURE)), *lines(dense)]


def test_assumptions_are_listed():
    said = " ".join(lines(model_of(MIXTURE)))
    for part in ("2 of 4 blocks, top_k 2", "capacity 1.25: 10 slots", "FLOPs and MFU", "balance"):
        assert part in said
    assert "no capacity limit: 1,920 slots" in " ".join(lines(model_of(f"{MIXTURE} capacity=0")))
    config = model_of(MIXTURE)
    split = replace(config, mesh=replace(config.mesh, c=2))
    assert "5 slots per expert for a part of a sequence of 8 tokens" in " ".join(lines(split))


def test_slots_do_not_depend_on_hybrid_sharding():
    config = model_of(f"{MIXTURE} capacity=0")
    config = replace(config, mesh=replace(config.mesh, d=4))
    sharded = replace(config, parallel=replace(config.parallel, zero=1, shard=2))
    assert of_mixture(sharded) == of_mixture(config)


# Layouts on 512 H100 with experts in 64 parts, as `plan` finds them: (words; over how many ranks a
# matrix is cut, of 2.5-D with a copy at each depth; mixtures of a rank; columns of its X).
PLANNED = {
    "switch-c": (
        "--mesh.p 2 --mesh.e 64 --mesh.x 4 --parallel.scheme 1d-sequence "
        "--parallel.schedule interleaved --parallel.chunks 5 --parallel.microbatches 2",
        (2 * 4, 15, 2080 // 4),
    ),
    "gshard-600b": (
        "--mesh.e 64 --mesh.x 2 --mesh.y 2 --mesh.z 2 --parallel.scheme 2.5d",
        (2 * 2, 18, 1024 // 8),
    ),
}


@pytest.mark.parametrize("name", PLANNED)
def test_published_mixtures_are_predicted_on_h100(name, capsys):
    words, (cut, mixtures, columns) = PLANNED[name]
    assert main([name, "--machine", "h100", "--ranks", "512", *words.split(), "--json"]) == 0
    out = capsys.readouterr().out
    assert "does not depend on the load balance" in out
    found, config = json.loads(out.splitlines()[-1]), load(name, [])
    assert found["memory"]["fits"] and 0 < found["mfu"] <= found["hfu"] < 1
    # bfloat16; an expert has one slot for a sequence, of which a rank has 1/64.
    experts = expert_parameters(config.model)
    rest = found["mixture"]["parameters"] - experts
    values = 2 * (experts / 64 + rest) / cut
    assert found["memory"]["worst"]["parameter"] == pytest.approx(values, rel=0.01)
    exchanged = 4 * (1 - 1 / 64) * 2048 * config.train.batch / 64 * columns * 2
    assert found["bytes"]["e"]["all_to_all"]["bytes"] == mixtures * exchanged
