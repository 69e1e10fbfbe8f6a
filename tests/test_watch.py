"""A run is shown while it goes on."""

import pytest

from hpc3d import watch


def test_watch_shows_the_newest_run_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert watch.main([]) == 2
    for name in ("old", "new"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "config.toml").touch()
    assert watch.main(["--once"]) == 0
    assert watch.main(["results/old", "--once"]) == 0
    assert watch.main(["results/none"]) == 2
    said = capsys.readouterr()
    assert said.out == "new   begins\nold   begins\n"
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["hpc3d.watch"] * 2


def test_watch_goes_on_until_the_run_has_ended(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").touch()
    monkeypatch.setattr(
        "time.sleep", lambda _: (tmp_path / "train.log").write_text("run kept in results/a\n")
    )
    assert watch.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["begins", "ended"]


@pytest.mark.parametrize("every", ["0", "x", "nan", "1e9"])
def test_watch_takes_a_number_of_seconds(every, capsys):
    with pytest.raises(SystemExit, match="2"):
        watch.main(["--every", every])
    assert "must be a number of seconds" in capsys.readouterr().err
