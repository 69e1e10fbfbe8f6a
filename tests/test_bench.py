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


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        (["published", "findings"], False),
        (["findings", "--measure"], True),
        (["published", "guards"], True),
    ],
)
def test_load_of_other_programs_is_reported_only_for_measurements(
    words, measured, monkeypatch, capsys
):
    seconds = iter([(0.0, 0.0, 0.0), (9.0, 10.0, 1.0)])  # busy, total, own
    monkeypatch.setattr("hpc3d.benchmarks.harness._cpu_seconds", lambda: next(seconds))
    monkeypatch.setattr("hpc3d.bench._benchmark", lambda *_: lambda _: None)
    assert bench.main(words) == 0
    assert ("other programs used 80% of the CPU time" in capsys.readouterr().out) == measured
