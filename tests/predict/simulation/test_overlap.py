"""Gradient reductions along d that overlap the backward pass shorten a step."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.predict.simulation.summary import exposed, summary
from hpc3d.studies import megatron
from tests.pipeline.mixes import config_of
from tests.predict.fixed import MACHINE
from tests.strided import strided

MACHINES = Path("inputs/machines")
H100, SELENE = (load(MACHINES / f"{name}.toml") for name in ("h100", "a100-selene"))
KINDS = {"devices": H100, "cores": replace(MACHINE, cores=4, wakeup_s=2e-5)}
# One line a layout: stages with tensor axes, sums of vectors over slow links before those of
# blocks, copies of gradients before a stage hands on its own, ZeRO, split backward passes.
LAYOUTS = """
p=8 d=8 x=8 scheme=1d layers=16 hidden=8192 batch=64 microbatches=8
p=4 d=4 x=2 y=2 z=2 layers=8 batch=64 microbatches=4 schedule=gpipe zero=1 order='x y z p d c e'
p=4 d=2 scheme=1d layers=8 batch=64 microbatches=16 zero=1 order='d p c e x y z'
p=2 d=8 x=8 scheme=1d layers=4 batch=64 microbatches=2 zero=2 order='d p c e x y z'
p=2 d=4 x=2 y=2 scheme=2d layers=4 batch=64 microbatches=4 zero=3
p=4 d=2 x=4 scheme=1d layers=8 batch=32 microbatches=8 schedule=interleaved chunks=2
p=4 d=2 x=2 scheme=1d layers=8 batch=32 microbatches=8 schedule=zb-v chunks=2 bucket_mb=1
p=1 d=4 x=2 y=2 z=2 layers=4 batch=64
""".strip().splitlines()
WIDE = "hidden=2048 heads=16 sequence=128 vocabulary=1024 dtype=float32"


def layout(line):
    return config_of(f"{WIDE} {line}")


def seconds(config, machine, overlap):
    changed = replace(config, parallel=replace(config.parallel, overlap=overlap))
    runs = simulate(changed, config.model.vocabulary, machine)
    return summary(runs, changed, machine)["step_time_s"]


@pytest.mark.parametrize(("line", "kind"), strided([*product(LAYOUTS, KINDS)], 7))
def test_overlap_never_lengthens_a_step(line, kind):
    config = layout(line)
    beside, after = (seconds(config, KINDS[kind], overlap) for overlap in (True, False))
    assert beside <= 1.01 * after


@pytest.mark.parametrize("line", [f"{LAYOUTS[0]} sequence=1024", LAYOUTS[-1]])
def test_overlap_hides_gradient_reduction_on_devices(line):
    """This holds for stages that pass on gradients, and for those that do not."""
    config = layout(line)
    assert seconds(config, H100, True) < 0.99 * seconds(config, H100, False)


@pytest.mark.slow
def test_overlap_shortens_a_published_step():
    """145.6 B parameters on 1,536 A100 (SC 2021), where each stage used to pass on its delay."""
    row = next(row for row in megatron.WEAK_SCALING if row[0] == "145.6B")
    config = megatron.config_of(megatron.weak(row))
    beside, after = (seconds(config, SELENE, overlap) for overlap in (True, False))
    assert 0.9 * after < beside < after


# Layout, and the option that overlaps part of its communication.
HIDDEN = {
    "d=8 zero=3 layers=2 batch=64 sequence=1024 dtype=bfloat16": "prefetch=true",
    "d=8 zero=1 layers=8 batch=16 sequence=128 dtype=bfloat16": "prefetch=true",
    "x=2 y=2 z=2 layers=2 batch=64 sequence=1024 dtype=bfloat16": "prefetch=true",
    "x=8 scheme=1d-sequence layers=2 batch=64 sequence=1024 dtype=bfloat16": "chunked_products=2",
}


@pytest.mark.parametrize("line", HIDDEN)
def test_overlap_with_products_shortens_a_step_but_moves_the_same_bytes(line):
    before, after = (layout(f"{line} backend=cupy {option}") for option in ("", HIDDEN[line]))
    found = [simulate(each, each.model.vocabulary, H100) for each in (before, after)]
    steps = [summary(runs, before, H100) for runs in found]
    assert steps[1]["step_time_s"] < 0.99 * steps[0]["step_time_s"]
    assert exposed(found[1][0]) < exposed(found[0][0])
    received = [
        {axis: sum(op["bytes"] for op in ops.values()) for axis, ops in each["bytes"].items()}
        for each in steps
    ]
    assert received[0] == received[1]
