"""The command `bench` before it starts a measurement."""

import pytest

from hpc3d import bench


@pytest.mark.parametrize("rounds", ["-3", "0", "1.5", "many"])
def test_rounds_must_be_a_positive_integer(rounds, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["trace", f"--rounds={rounds}"])
    assert end.value.code == 2
    assert f"{rounds}: must be an integer from 1 to " in capsys.readouterr().err


def test_calls_benchmark_must_be_run_separately(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["calls", "step"])
    assert end.value.code == 2
    assert "cannot be combined with other benchmarks" in capsys.readouterr().err
