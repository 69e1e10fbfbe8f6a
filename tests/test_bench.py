"""The command `bench` before it measures anything."""

import pytest

from hpc3d import bench


@pytest.mark.parametrize("rounds", ["-3", "0", "1.5", "many"])
def test_a_number_of_pairs_is_at_least_one(rounds, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["trace", f"--rounds={rounds}"])
    assert end.value.code == 2
    assert f"{rounds}: must be an integer from 1 to " in capsys.readouterr().err


def test_calls_run_on_ranks_that_the_others_have_not(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["calls", "step"])
    assert end.value.code == 2
    assert "run it without other names" in capsys.readouterr().err
