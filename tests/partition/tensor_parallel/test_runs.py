"""Plans with tensor-parallel ranks on real ranks."""

import pytest

pytest.importorskip("torch")

from tests.mpi import checked
from tests.partition.execution.modules import STEPS, trained_by_torch
from tests.partition.execution.test_module_run import (
    AS_TORCH,
    COMMAND,
    assert_exported,
    assert_trained,
    written,
)
from tests.partition.tensor_parallel.modules import HERE
from tests.runs import newest


@pytest.mark.slow
def test_run_matches_torch_and_is_resumed_without_tensor_parallelism(tmp_path):
    """Two stages of two ranks, then one rank; the checkpoint has the names of the module."""
    name, words = f"{HERE}:in_double", [f"--{key}={value}" for key, value in AS_TORCH.items()]
    split = written(tmp_path / "split.json", name, (1, 1), tensor=2)
    checked(4, *COMMAND, split, *words, "--run.out", tmp_path)
    expected, seen = trained_by_torch(name, 2)
    del expected["head.weight"]  # the token table
    run = newest(tmp_path)
    assert_trained(run, expected, seen)
    alone = written(tmp_path / "alone.json", name, (1,))
    checked(1, *COMMAND, alone, "--resume", run, "--steps", 2 * STEPS)
    assert_exported(run, name, tmp_path / "model.safetensors")
    log = (run / "train.log").read_text()
    assert "2 tensor-parallel ranks per replica" in log and "all-reduces of tensor-par" in log
