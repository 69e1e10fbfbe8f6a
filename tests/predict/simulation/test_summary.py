"""The summary of a simulated step."""

import pytest

from hpc3d.predict.simulation.count import every_rank
from hpc3d.predict.simulation.memory_recorder import TraceRows
from hpc3d.predict.simulation.simulator import step_length
from hpc3d.predict.simulation.summary import (
    mean_received,
    received_per_rank,
    summary,
    total_received,
)
from tests.predict.fixed import MACHINE
from tests.predict.simulation.test_simulator import simulated


def test_summary_reports_token_tables_and_logits():
    """The first and the last stage have a table; the last stage has logits of 72 tokens."""
    config, runs = simulated("p=4 schedule=1f1b microbatches=2 vocabulary=29")
    found = summary(runs, config, MACHINE)["memory"]["stages"]
    assert [stage["tables"] for stage in found] == [29 * 24 * 8, 0, 0, 29 * 24 * 8]
    assert [stage["logits"] for stage in found] == [0, 0, 0, 24 * 3 * 29 * 8]


def test_communication_excludes_waiting_for_other_stages():
    """Without tensor and data parallelism, all calls of a rank are calls between stages."""
    for mesh, exposed in (("p=2", False), ("p=2 d=2", True), ("d=2", True)):
        config, runs = simulated(f"{mesh} schedule=1f1b microbatches=2 vocabulary=29")
        found = summary(runs, config, MACHINE)
        assert (found["communication"] > 0) == exposed
        shares = (found["time"][f"{name}_s"] for name in ("communication", "computation", "idle"))
        calls, *others = (share / found["step_time_s"] for share in shares)
        assert found["communication"] == pytest.approx(calls)
        assert calls + sum(others) == pytest.approx(1)


def test_bubble_of_a_two_stage_pipeline():
    """With one microbatch, stage 2 waits for a forward pass, and stage 1 for both passes."""
    line = "p=2 schedule=gpipe microbatches=1 hidden=32 heads=4 batch=4 vocabulary=8"
    config, runs = simulated(line)
    assert 0.4 < summary(runs, config, MACHINE)["bubble"] < 0.6
    config, runs = simulated(
        line.replace("microbatches=1", "microbatches=16").replace("batch=4", "batch=64")
    )
    # The ideal bubble of equal stages is 1 / 17; these are not equal, nor are messages free.
    assert 0.03 < summary(runs, config, MACHINE)["bubble"] < 0.3


def test_local_updates_are_averaged_over_the_steps_between_agreements():
    """Of 4 steps, one has an agreement; it receives as many bytes as an all-reduce of the
    parameters in every step, and needs more memory."""
    line = "p=2 d=4 schedule=1f1b microbatches=2 vocabulary=29 outer_momentum=0.9"
    every = {steps: simulated(f"{line} local_steps={steps}") for steps in (1, 4)}
    always, mean = (summary(runs, config, MACHINE) for config, runs in every.values())
    assert always["agreement"] == {
        "every": 1,
        "sync": "blocking",
        "step_s": always["step_time_s"],
        "bytes": always["bytes"],
    }
    without = step_length(every[4][1]) / 1e9
    assert mean["agreement"] == always["agreement"] | {"every": 4}
    assert mean["step_time_s"] == pytest.approx((3 * without + always["step_time_s"]) / 4)
    assert without < mean["step_time_s"] < always["step_time_s"]
    assert mean["memory"] == always["memory"]
    assert "r" not in mean["bytes"] and "r" in always["bytes"]
    received = mean_received(every[1][1][0], 1), mean_received(every[4][1][0], 4)
    assert received[0] == total_received(always["bytes"])
    assert 4 * received[1] == received[0] + 3 * total_received(mean["bytes"])
    (one, agreeing), (four, runs) = every.values()
    local = received_per_rank([run._replace(agreement=None) for run in runs], four)
    mixed = (received_per_rank(agreeing, one) + 3 * local) / 4
    assert received_per_rank(runs, four) == pytest.approx(mixed) and mixed > local


AVERAGED = """
x=4 schedule=none microbatches=1
p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=2 optimizer=muon
d=3 x=2 schedule=none microbatches=2 zero=1 optimizer=muon batch=12
p=2 x=2 scheme=3d-broadcast schedule=zb-h1 microbatches=4
x=2 y=2 z=3 schedule=none microbatches=2 hidden=72 scheme=3d-broadcast
""".strip().splitlines()


@pytest.mark.parametrize("line", AVERAGED)
def test_mean_of_received_bytes_counts_every_rank(line):
    """Rank 0 receives no batch, because it reads the text."""
    config, runs = simulated(line)
    ranks = every_rank(config, config.model.vocabulary)
    received = [
        sum(size for (_, op, _), (_, size) in rank.moved().items() if op != "send")
        for rank in ranks
    ]
    assert len({*received}) > 1
    assert received_per_rank(runs, config) == pytest.approx(sum(received) / len(ranks), rel=1e-12)


REPLAYED = """
p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=6 zero=1 backend=cupy dtype=float32
p=4 c=2 schedule=1f1b microbatches=8 sequence=8 layers=8
p=2 x=2 scheme=3d-broadcast schedule=zb-h1 microbatches=4
p=3 schedule=1f1b microbatches=4 layers_per_stage=[2,0,2]
p=4 schedule=zb-v chunks=2 microbatches=8 layers=8 layers_per_stage=[2,1,1,0,0,1,1,2]
p=4 schedule=v-half chunks=2 microbatches=8 layers=8 layers_per_stage=[2,1,1,0,0,1,1,2]
""".strip().splitlines()


@pytest.mark.parametrize("line", REPLAYED)
def test_summary_of_replayed_passes_equals_that_of_all_rows(line):
    config, runs = simulated(line)
    assert all(run.events.replays for run in runs)

    def complete(run):
        return run._replace(events=TraceRows(run.rows, [], 0))

    whole = [complete(run)._replace(others=tuple(map(complete, run.others))) for run in runs]
    assert summary(runs, config, MACHINE) == summary(whole, config, MACHINE)
