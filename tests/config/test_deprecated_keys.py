"""Old names of keys and values are accepted everywhere, with one warning per name in user input.

tests/config/run_with_old_names is a run of three steps of an earlier version, with every old key.
"""

import shutil
from operator import attrgetter
from pathlib import Path

import pytest

import hpc3d.trace
from hpc3d import report, simulate
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.checkpoints.inspect import config_of
from hpc3d.checkpoints.resume import changes, config_of_run
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.config.deprecated_keys import KEYS, VALUES
from hpc3d.config.load import load, stored, to_toml
from hpc3d.config.package_data import shipped
from hpc3d.config.resolve import resolve
from hpc3d.console.small_files import toml
from hpc3d.predict.calibration import align_trace
from hpc3d.predict.machine import machine_file
from hpc3d.trace.locate import trace_of
from hpc3d.trace.previous_attempts import work
from hpc3d.trace.trace_config import one_time
from tests.mpi import checked, mpirun
from tests.runs import losses, newest, words

OLD_RUN = Path(__file__).parent / "run_with_old_names"
# Old key and value as one writes them, new key and value as they are read.
RENAMED = [
    ("guard.products_every", "7", "guard.abft_every", 7),
    ("guard.spike", "4.5", "guard.loss_spike_sigma", 4.5),
    ("parallel.stages", "[1, 1]", "parallel.layers_per_stage", (1, 1)),
    ("train.graph", "true", "train.cuda_graph", True),
    ("run.tensorboard", "true", "run.trackers", ("tensorboard",)),
    ("mesh.transport", '"staged"', "mesh.transport", "host-staged"),
    ("trace.clock", '"processor"', "trace.clock", "cpu"),
]
NOTICE = {
    old: f"warning: {old} is now called {new}"
    if old != new
    else f'warning: {old} = {text} is now called "{value}"'
    for old, text, new, value in RENAMED
}
KEYS_RENAMED = [row for row in RENAMED if row[0] != row[2]]
ALL_OLD = "".join(f"{old} = {text}\n" for old, text, _, _ in RENAMED)
every_name = pytest.mark.parametrize(("old", "text", "new", "value"), RENAMED)
every_key = pytest.mark.parametrize(("old", "text", "new", "value"), KEYS_RENAMED)


@pytest.fixture
def file(tmp_path):
    """Return a function that writes an input file."""

    def write(text):
        path = tmp_path / "input.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Copy of the old run."""
    return Path(shutil.copytree(OLD_RUN, tmp_path / "run"))


def warnings(capsys):
    return capsys.readouterr().err.splitlines()


def test_every_renamed_key_is_tested_and_in_the_old_run():
    keys = {f"{section}.{old}" for section, names in KEYS.items() for old in names}
    values = {
        f"{section}.{key}"
        for section, names in VALUES.items()
        for key, old in names.items()
        if all(isinstance(each, str) for each in old)  # others are values of an old key
    }
    assert {old for old, *_ in RENAMED} == keys | values
    tree = toml((OLD_RUN / "config.toml").read_text(encoding="utf-8"))
    for section, names in KEYS.items():
        assert {*names} <= {*tree[section]} and not {*names.values()} & {*tree[section]}


# What a user writes


@every_name
def test_old_key_in_a_file_is_accepted_with_a_warning(old, text, new, value, file, capsys):
    assert attrgetter(new)(load(file(f"{old} = {text}\n"), [])) == value
    assert warnings(capsys) == [NOTICE[old]]


@every_name
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_old_key_as_an_option_is_accepted_with_a_warning(old, text, new, value, form, capsys):
    option = [f"--{old}", text] if form == "two words" else [f"--{old}={text}"]
    assert attrgetter(new)(load(None, option)) == value
    assert warnings(capsys) == [NOTICE[old]]


def test_table_option_may_contain_old_keys(capsys):
    assert load(None, ["--guard", "{spike = 4.5}"]).guard.loss_spike_sigma == 4.5
    assert warnings(capsys) == [NOTICE["guard.spike"]]


@every_name
def test_old_key_in_file_and_option_warns_once(old, text, new, value, file, capsys):
    load(file(f"{old} = {text}\n"), [f"--{old}", text, f"--{old}", text])
    assert warnings(capsys) == [NOTICE[old]]


@every_name
def test_new_key_causes_no_warning(old, text, new, value, file, capsys):
    text = "true" if value is True else f'"{value}"' if isinstance(value, str) else text
    assert attrgetter(new)(load(file(f"{new} = {text}\n"), [f"--{new}", text])) == value
    assert warnings(capsys) == []


@every_key
def test_old_and_new_key_together_are_rejected(old, text, new, value, file):
    line = f"{old} is the old name of {new}, which is also set; leave {old} out"
    both = [f"--{old}", text, f"--{new}", text]
    section, key = old.split(".")
    table = [f"--{section}", f"{{{key} = {text}}}", f"--{new}", text]
    for path, options in ((file(f"{old} = {text}\n{new} = {text}\n"), []), (None, both)):
        with pytest.raises(ValueError) as refused:
            load(path, options)
        assert str(refused.value) == line
    with pytest.raises(ValueError) as refused:
        load(None, table)
    assert str(refused.value) == line


def test_option_with_either_name_overrides_the_file(file, capsys):
    old, new = "guard.spike = 1.0\n", "guard.loss_spike_sigma = 1.0\n"
    assert load(file(old), ["--guard.loss_spike_sigma", "2.0"]).guard.loss_spike_sigma == 2.0
    assert load(file(new), ["--guard.spike", "3.0"]).guard.loss_spike_sigma == 3.0
    assert warnings(capsys) == [NOTICE["guard.spike"]] * 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("guard = 5", "guard: must be a table, not 5; "),
        ("trace.clock = 5", "trace.clock: input should be .* not 5; correct the value"),
        ('trace.clock = ["processor"]', "trace.clock: input should be .* correct the value"),
    ],
)
def test_wrong_types_are_rejected_despite_renamed_keys(text, line, file):
    with pytest.raises(ValueError, match=line):
        load(file(text), [])


@pytest.mark.slow
def test_all_ranks_print_one_rename_warning(tmp_path):
    path = tmp_path / "input.toml"
    path.write_text("guard.spike = 5.0\n", encoding="utf-8")
    how = {"train__steps": 2, "guard__products_every": 1, "guard__spike": 4.0, "mesh__x": 2}
    done = mpirun(2, "-m", "hpc3d.train", path, *words(tmp_path / "out", **how))
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stderr.splitlines() if line.startswith("warning"))
    assert found == [NOTICE["guard.products_every"], NOTICE["guard.spike"]]
    config = (newest(tmp_path / "out") / "config.toml").read_text(encoding="utf-8")
    assert to_toml(stored(config)) == config
    assert "abft_every = 1" in config and "loss_spike_sigma = 4.0" in config


# What runs keep


def test_equivalent_texts_are_equal_and_written_with_new_keys(capsys):
    old = stored(ALL_OLD)
    new = to_toml(old)
    assert stored(new) == old and work(new) == work(to_toml(stored(new)))
    assert work(ALL_OLD) == work("".join(f"{n} = {text_of(v)}\n" for _, _, n, v in RENAMED))
    tree = toml(new)
    for old_key, _, new_key, _ in KEYS_RENAMED:
        section, key = new_key.split(".")
        assert key in tree[section] and old_key.split(".")[1] not in tree[section]
    assert warnings(capsys) == []


def test_run_older_than_a_key_has_the_same_workload():
    old = (OLD_RUN / "config.toml").read_text(encoding="utf-8")
    now = to_toml(resolve(load(OLD_RUN / "config.toml", [], of_run=True), 1))
    assert "norm_epsilon = 1e-05" in now and "norm_epsilon" not in old
    assert work(old) == work(now)
    assert work(old) != work(old.replace("layers = 1", "layers = 2"))
    assert work(old) != work(old.replace("[model]", "[model]\nnorm_epsilon = 1e-6"))


def text_of(value):
    """Return a value in TOML syntax."""
    texts = {bool: lambda: "true", str: lambda: f'"{value}"', tuple: lambda: str([*value])}
    return texts.get(type(value), lambda: str(value))()


def test_old_checkpoint_is_read(run, capsys):
    config = config_of(Checkpoint(run / "checkpoints" / "step-00000003"))
    assert config.guard.abft_every == 2 and config.guard.loss_spike_sigma == 5.0
    assert config.parallel.layers_per_stage == (1,) and config.trace.clock == "cpu"
    now = config_of_run(run, [])
    assert now == config and changes(config, now) == [] and warnings(capsys) == []


@pytest.mark.slow
def test_old_run_resumes_without_a_warning(run, tmp_path):
    """The losses of both versions equal those of a run of the same length with new names."""
    anew = tmp_path / "anew.toml"
    anew.write_text(to_toml(load(run / "config.toml", [], of_run=True)), encoding="utf-8")
    steps = ["--train.steps", "5", "--run.out", tmp_path / "anew"]
    done = mpirun(1, "-m", "hpc3d.train", "--resume", run, *steps)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert "resume: step 3 follows" in done.stdout
    assert "resume: guard" not in done.stdout and "resume: trace" not in done.stdout
    written = (run / "config.toml").read_text(encoding="utf-8")
    assert to_toml(stored(written)) == written and "loss_spike_sigma = 5.0" in written
    checked(1, "-m", "hpc3d.train", anew, *steps)
    # The first three steps are of another processor, whose products round otherwise.
    anew = losses(newest(tmp_path / "anew")).tolist()
    assert losses(run).tolist() == pytest.approx(anew, rel=1e-7)


def test_old_trace_is_reported(run, capsys):
    """Its times are CPU times, for which no rates are reported."""
    with hpc3d.trace.open(trace_of(run)) as trace:
        assert 'clock = "processor"' in trace.attrs["config"]
        assert not one_time(trace)
        config = load(run / "config.toml", [], of_run=True)
        assert configuration(trace) == align_trace.configuration(trace) == config
    assert report.main([str(run), "--tables", "--out", str(run / "report")]) == 0
    out, err = capsys.readouterr()
    assert "its own CPU time" in out and "warning" not in err


def test_old_run_is_simulated_without_a_warning(run, capsys):
    trace_of(run)
    assert simulate.main([str(run), "--machine", "h100"]) == 0
    assert warnings(capsys) == []


# Machine files

MACHINE = shipped("machines/h100.toml").read_text(encoding="utf-8")
OLD_KEYS = {"wakeup_s": "wake_s", "max_fused_head_dim": "widest_head"}


@pytest.mark.parametrize(("new", "old"), OLD_KEYS.items())
def test_machine_file_with_an_old_key_is_accepted_with_a_warning(new, old, file, capsys):
    begun = "" if f"{new} = " in MACHINE else f"{new} = 0.125\n"
    wanted = machine_file.load(file(begun + MACHINE))
    assert machine_file.load(file((begun + MACHINE).replace(f"{new} =", f"{old} ="))) == wanted
    assert warnings(capsys) == [f"warning: {old} is now called {new}"]
    assert f"\n{new} = " in machine_file.dumps(wanted) and f"{old} =" not in machine_file.dumps(
        wanted
    )


@pytest.mark.parametrize(("new", "old"), OLD_KEYS.items())
def test_machine_file_with_old_and_new_key_is_rejected(new, old, file):
    begun = "" if f"{new} = " in MACHINE else f"{new} = 0.125\n"
    with pytest.raises(ValueError) as refused:
        machine_file.load(file(f"{old} = 0\n{begun}{MACHINE}"))
    assert (
        str(refused.value) == f"{old} is the old name of {new}, which is also set; leave {old} out"
    )
