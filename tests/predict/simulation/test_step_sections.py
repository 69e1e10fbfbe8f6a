"""The sections of a step (sub-blocks of the model, by phase) sum to the step."""

from dataclasses import replace

import numpy as np
import pytest

from hpc3d.predict.simulation import simulator
from hpc3d.predict.simulation.simulator import simulate, step_length
from hpc3d.predict.simulation.step_sections import sections, time_of
from hpc3d.predict.simulation.summary import summary
from hpc3d.trace.schema import CATEGORY, SEND
from tests.pipeline.mixes import config_of
from tests.predict.fixed import MACHINE
from tests.predict.machine.test_between_hosts import hosts
from tests.strided import strided

CONTENDED = replace(MACHINE, contention=1.5)
COMM, COPY, WAIT = map(CATEGORY.index, ("comm", "copy", "wait"))
LINES = """
p=2 d=2 x=2 schedule=1f1b microbatches=4 zero=3 prefetch=true
microbatches=3
p=4 schedule=zb-h1 microbatches=8
p=2 schedule=zb-v chunks=2 microbatches=4 recompute=full
d=2 c=2 x=2 schedule=none microbatches=4 zero=1 sequence=4 kind=llama kv_heads=4 ffn=48
e=2 x=2 y=2 schedule=none microbatches=2 experts=4 scheme=2d-summa
p=2 x=2 y=2 schedule=gpipe microbatches=2 kind=bert scheme=3d-broadcast
schedule=none microbatches=2 layers=7 backend=cupy dtype=float32 recompute=[3]
schedule=none microbatches=2 backend=cupy dtype=float32 offload='["activations"]'
""".strip().splitlines()


def simulated(line, machine=MACHINE):
    config = config_of(line)
    return config, simulate(config, config.model.vocabulary, machine)


def total(run, quantity):
    return sum(value for (*_, name), value in run.account.items() if name == quantity)


@pytest.mark.parametrize("line", strided(LINES, 8))
@pytest.mark.parametrize(
    "machine", [MACHINE, CONTENDED, hosts(2, wake=2e-5)], ids=["GPUs", "contention", "CPUs"]
)
def test_sections_sum_to_the_simulated_step(line, machine):
    """Integer nanoseconds, bytes and FLOPs sum exactly."""
    if "float32" not in line and machine.cores:
        line += " dtype=float32"
    if "cupy" in line and machine.cores:
        pytest.skip("a GPU")
    config, runs = simulated(line, machine)
    for run in runs:
        rows = run.rows
        calls = rows[(rows["group"] >= 0) & np.isin(rows["category"], (COMM, COPY))]
        received = (rows["category"] == COMM) & (rows["op"] != SEND)
        assert total(run, "time") == run.step[3] - run.step[2]
        assert total(run, "bytes") == rows["bytes"][received].sum()
        assert total(run, "flop") == rows["flops"].sum()
        kept = sum(row["saved_bytes"] for row in sections(run, 0))
        assert kept == sum(run.saved.values()) and (kept > 0 or config.parallel.offload)
        waits = rows["dur"][rows["category"] == WAIT].sum()
        assert total(run, "calls") + total(run, "idle") == calls["dur"].sum() + waits
        found = sections(run, step_length(runs))
        assert sum(time_of(found).values()) == pytest.approx(step_length(runs) / 1e9, rel=1e-12)
        assert {row["phase"] for row in found} <= {"forward", "backward", "update", "other"}
    found = summary(runs, config, machine)
    time = found["time"]
    assert sum(time.values()) - time["stage"] == pytest.approx(found["step_time_s"], rel=1e-12)


@pytest.mark.parametrize("line", strided(LINES, 8))
def test_replayed_passes_have_the_sections_of_executed_ones(line, monkeypatch):
    """Bytes and FLOPs are equal, and so are times, if no stage waits for another."""
    _, replayed = simulated(line)
    monkeypatch.setattr(simulator, "replay_passes", lambda *_: {})
    for ours, theirs in zip(replayed, simulated(line)[1], strict=True):
        names = ("bytes", "flop") if "p=" in line or "d=" in line else ("bytes", "flop", "time")
        for key in {*ours.account, *theirs.account}:
            assert key[2] not in names or ours.account.get(key, 0) == theirs.account.get(key, 0)


def test_sub_blocks_have_their_products():
    """Forward FLOPs of T tokens: 8 T h^2 and the scores, 16 T h^2, and 2 T h v."""
    _, (run,) = simulated("microbatches=2 layers=3 hidden=24 heads=12 sequence=3 batch=4")
    tokens, hidden, layers, vocabulary = 12, 24, 3, 29
    flop = {(row["part"], row["phase"]): row["flop"] for row in sections(run, 10**12)}
    scores = 2 * 2 * tokens * 3 * hidden * layers
    assert flop["attention", "forward"] == 8 * tokens * hidden**2 * layers + scores
    assert flop["MLP", "forward"] == 16 * tokens * hidden**2 * layers
    assert flop["MLP", "backward"] == 2 * flop["MLP", "forward"]
    assert flop["head", "forward"] == 2 * tokens * hidden * vocabulary
    assert flop["norm", "forward"] == flop["embedding", "forward"] == 0


@pytest.mark.parametrize("modules", ['["mlp"]', '["mlp_act"]', '["layernorm","mlp"]'])
@pytest.mark.parametrize("layer", ["", "experts=4 shared_experts=1"])
def test_recomputation_is_part_of_the_backward_pass_of_its_sub_block(modules, layer):
    """The time of the other sections does not depend on the recomputed modules."""
    line = f"microbatches=2 layers=3 backend=cupy dtype=float32 {layer}"
    (_, (run,)), (_, (again,)) = simulated(line), simulated(f"{line} recompute='{modules}'")
    other = [each for each in again.account if each[0] == "other"]
    assert {each: again.account[each] for each in other if each[1] != "optimizer"} == {
        each: run.account[each] for each in other if each[1] != "optimizer"
    }
    key = "MLP", "recompute", "time"
    assert again.account[key] > 0 == run.account.get(key, 0)


def test_tensor_parallelism_moves_the_bytes_of_its_sub_blocks():
    """1-D: an all-reduce of the output of both sub-blocks in each pass."""
    _, (run,) = simulated("x=2 scheme=1d microbatches=1 layers=2 hidden=24 batch=4")
    received = {(row["part"], row["phase"]): row["bytes"] for row in sections(run, 10**12)}
    output = 2 * 4 * 3 * 24 * 8  # layers x tokens x hidden x bytes; twice (2 - 1) / 2
    for part in ("attention", "MLP"):
        assert received[part, "forward"] == received[part, "backward"] == output
    assert ("norm", "forward") not in received or not received["norm", "forward"]


def test_saved_activations_are_those_of_the_sub_blocks():
    """With n = T h elements per layer, 16 n + a T s: q, k, v, output and probabilities of
    attention, rows and output of each norm, and input and output of GELU in the MLP."""
    line = "microbatches=1 layers=2 hidden=24 heads=12 sequence=3 batch=4 attention=full"
    _, (run,) = simulated(line)
    tokens, hidden, heads, layers, size = 12, 24, 12, 2, 8
    n = size * layers * tokens * hidden
    scores = size * layers * heads * tokens * 3
    assert run.saved["MLP"] == 8 * n
    assert run.saved["attention"] == 4 * n + scores
    assert run.saved["norm"] == 4 * n + n // layers * 2
    assert run.saved["head"] == tokens * 29 * size
    _, (again,) = simulated(f"{line} recompute=full")
    assert sum(again.saved.values()) < 0.3 * sum(run.saved.values())
