"""Asynchronous pipelines, compared with their update rules on one rank."""

from functools import cache

import numpy as np
import pytest

from hpc3d.comm.threads import run
from tests.pipeline.in_torch import RULES
from tests.pipeline.mixes import (
    alone,
    config_of,
    cover,
    same,
    serial,
    train,
    words_of,
)
from tests.strided import strided

PIPEDREAM = """
p=1 microbatches=4
p=2 microbatches=4
p=2 microbatches=8 overlap=false layers_per_stage=[1,3]
p=4 microbatches=4 bucket_mb=0
p=4 microbatches=8
p=4 microbatches=2 gelu=exact
p=2 d=2 microbatches=4 zero=0
p=2 d=2 microbatches=4 zero=1
p=4 d=2 microbatches=4 zero=2
p=2 d=2 x=2 microbatches=4 zero=3
p=2 x=2 z=2 microbatches=4 keep_gathered=false
""".strip().splitlines()

TWO_VERSIONS = """
p=1 microbatches=2
p=2 microbatches=4
p=2 microbatches=8 tied=false clip=0
p=4 microbatches=4 clip=0 layers_per_stage=[0,2,1,1]
p=4 microbatches=8 tied=false overlap=false
p=2 d=2 microbatches=4 zero=0 bucket_mb=0
p=2 d=2 microbatches=4 zero=1
p=4 d=2 microbatches=4 zero=2 tied=false
p=2 d=2 x=2 microbatches=4 zero=3
p=2 x=2 z=2 microbatches=4 keep_gathered=false clip=0
""".strip().splitlines()

LINES = [
    *(f"schedule=pipedream tied=false clip=0 steps=4 {line}" for line in PIPEDREAM),
    *(f"schedule=pipedream-2bw steps=4 {line}" for line in TWO_VERSIONS),
]


@cache
def reference(line):
    words = words_of(line)
    return RULES[words["schedule"]](config_of(line))


def rule_of(line):
    """Return the words of a mix that affect the update rules."""
    words, keys = words_of(line), ("schedule", "p", "microbatches", "layers_per_stage")
    return " ".join([*(f"{key}={words[key]}" for key in keys if key in words), alone(line)])


@pytest.mark.parametrize("line", strided(LINES, 12))
def test_asynchronous_pipeline_follows_its_update_rule(line):
    config, expected = config_of(line), reference(rule_of(line))
    found = run(config.sizes(), lambda mesh: train(mesh, config))
    for trained in found:
        same(trained, expected)
    cover(found, expected)


def distance(one, other):
    """Return the largest difference of a weight."""
    pairs = [(block, other.weights[name][1]) for name, (_, block) in one.weights.items()]
    return max(np.abs(ours - theirs).max() for ours, theirs in pairs)


def test_stale_weights_change_the_result():
    """So no mix above can pass with the newest weights, or with those of another stage."""
    line = "schedule=pipedream tied=false clip=0 steps=4 microbatches=4"
    fresh, two, four = (reference(f"{line} p={stages}") for stages in (1, 2, 4))
    assert min(distance(fresh, two), distance(two, four), distance(fresh, four)) > 1e-4
    late = reference("schedule=pipedream-2bw steps=4")
    assert distance(late, serial("steps=4")) > 1e-4
