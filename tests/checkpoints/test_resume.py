"""Resuming: the selected run and checkpoint, and settings that change with the number of ranks."""

import json
import re
from dataclasses import replace

import pytest

from hpc3d.checkpoints.resume import (
    changes,
    checkpointed_config,
    checkpointed_texts,
    config_of_run,
    continued,
    mismatch,
    resolved_on,
    run_to_resume,
    with_free_mesh,
)
from hpc3d.checkpoints.sharded import Checkpoint, steps_of
from hpc3d.config.load import to_toml
from hpc3d.config.resolve import resolve
from hpc3d.console.sanitize import lines_of
from tests.checkpoints.killed_runs import LAYOUTS, losses, run_until
from tests.pipeline.mixes import config_of

PIPED = (
    "p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=4 zero=1 batch=96 "
    "layers_per_stage=[1,1,1,1]"
)


@pytest.mark.parametrize("ranks", [4, 16])
def test_stages_and_replicas_are_kept_if_they_divide_the_ranks(ranks):
    """The 2 stages and 2 replicas are kept on 4 and 16 ranks; only the cuboid changes."""
    config = resolve(with_free_mesh(config_of(PIPED), ranks), ranks)
    mesh, parallel = config.mesh, config.parallel
    assert (mesh.p, mesh.d, mesh.x * mesh.y * mesh.z) == (2, 2, ranks // 4)
    assert (parallel.schedule, parallel.chunks, parallel.zero) == ("interleaved", 2, 1)
    assert parallel.layers_per_stage == (1, 1, 1, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_otherwise_all_ranks_form_one_cuboid(ranks):
    """The number of ranks is smaller than stages times replicas, or not a multiple of it."""
    config = resolve(with_free_mesh(config_of(PIPED), ranks), ranks)
    mesh, parallel = config.mesh, config.parallel
    assert (mesh.p, mesh.d, mesh.x * mesh.y * mesh.z) == (1, 1, ranks)
    assert (parallel.schedule, parallel.zero, parallel.layers_per_stage) == ("none", 0, None)


def test_error_on_a_new_number_of_ranks_names_the_axes_that_were_reset(tmp_path):
    config = config_of(PIPED)
    (tmp_path / "config.toml").write_text(to_toml(resolve(config, 8)))
    with pytest.raises(ValueError, match="no cuboid of 11 ranks") as caught:
        resolved_on(11, config, tmp_path)
    assert lines_of(caught.value)[1:] == [
        "--resume: p=2 d=2 of the run was reset to 1, because 4 does not divide 11 ranks; use a "
        "multiple of 4 ranks, or other sizes, with --mesh.p or --mesh.d"
    ]
    with pytest.raises(ValueError, match="no cuboid of 11 ranks") as caught:
        resolved_on(44, config, tmp_path)  # the 2 stages and 2 replicas are kept
    assert len(lines_of(caught.value)) == 1


@pytest.mark.parametrize(
    ("mesh", "line"),
    [
        ({"d": 3}, "mesh: d 3 = 3 ranks, but the job has 4 ranks"),
        ({"x": 2, "y": 4}, "mesh: p 2 x d 2 x x 2 x y 4 = 32 ranks, but the job has 4 ranks"),
        (dict.fromkeys("pdxyz", 2), "mesh: p 2 x d 2 x x 2 x y 2 x z 2 = 32 ranks"),
    ],
)
def test_sizes_that_the_user_has_chosen_are_not_reset(mesh, line, tmp_path):
    config = config_of(PIPED)
    (tmp_path / "config.toml").write_text(to_toml(resolve(config, 8)))
    changed = replace(config, mesh=replace(config.mesh, **mesh))
    with pytest.raises(ValueError, match=line):
        resolved_on(4, changed, tmp_path, mesh)
    assert resolved_on(4, changed, tmp_path).mesh.grid().size == 4


def test_expert_parallelism_is_kept_if_it_divides_the_ranks():
    config = config_of("e=2 x=2 y=2 microbatches=2 experts=4")
    assert [with_free_mesh(config, ranks).mesh.e for ranks in (2, 3, 4, 8)] == [2, 1, 2, 2]


def test_mesh_is_unchanged_on_the_same_number_of_ranks():
    config = config_of(PIPED)
    assert with_free_mesh(config, 8) is config
    assert with_free_mesh(config_of("p=2 x=1 y=1 z=1 schedule=1f1b"), 2).mesh.p == 2


@pytest.mark.parametrize("name", ["run", "lr=0.1", "lr=0.1=x", "--odd"])
@pytest.mark.parametrize("joined", [True, False])
def test_resume_option_is_removed_from_the_arguments(name, joined, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.toml").touch()
    option = [f"--resume={name}"] if joined else ["--resume", name]
    words = ["--train.steps=9", *option, "--seed", "3"]
    assert run_to_resume(words) == tmp_path / name
    assert words == ["--train.steps=9", "--seed", "3"]
    assert run_to_resume(words) is None


@pytest.mark.parametrize("name", ["run/checkpoints/step-00000004", "run/checkpoints"])
def test_run_folder_of_a_checkpoint_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"^--resume {name}: .* run folder; use --resume run, "):
        run_to_resume(["--resume", name])


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoint_is_named_and_the_previous_one_is_used(damaged, tmp_path):
    """The checkpoints are of steps 2 and 3. Without an intact one, the run cannot be resumed."""
    run_until(tmp_path, "x=2", 3)
    whole = losses(tmp_path)
    for folder in steps_of(tmp_path / "checkpoints")[:damaged]:
        (folder / "rank-00001.bin").write_bytes(b"")
    if damaged == 2:
        with pytest.raises(ValueError, match=r"(?s)step-00000003 .*step-00000002 .*new run"):
            run_until(tmp_path, "x=2", 4)
        return
    run_until(tmp_path, "x=2", 4)
    said = (tmp_path / "said").read_text().splitlines()
    (place,) = (n for n, line in enumerate(said) if "resume: step 2 follows" in line)
    assert said[place - 1].startswith("resume: ") and "rank-00001.bin" in said[place - 1]
    assert {step: found for step, found in losses(tmp_path).items() if step < 3} == whole


@pytest.mark.parametrize(
    ("change", "moments", "line"),
    [
        ("", True, None),
        ("dropout=0.5", True, None),
        ("experts=2", True, "has model.experts = 0, not 2: "),
        ("optimizer=sgd", True, None),  # which needs none
        ("optimizer=sgd", False, None),
        ("", False, " first and second moments"),
        ("layers=2", True, "has model.layers = 1, not 2: "),
        ("tied=false", True, "has model.tied = True, not False: "),
    ],
)
def test_checkpoint_must_match_the_model_and_optimizer(change, moments, line, tmp_path):
    run_until(tmp_path, "serial", 1)
    opened = Checkpoint(tmp_path / "checkpoints" / "step-00000001")
    if not moments:
        opened.sources = {key: parts for key, parts in opened.sources.items() if key[1] == "value"}
    found = mismatch(config_of(f"{LAYOUTS['serial']} {change}"), opened)
    assert found is None if line is None else line in found


def test_router_capacity_and_losses_may_change_on_resume(tmp_path):
    run_until(tmp_path, "mixture", 1)
    opened, line = Checkpoint(tmp_path / "checkpoints" / "step-00000001"), LAYOUTS["mixture"]
    assert mismatch(config_of(f"{line} capacity=2 balance_loss=0 z_loss=0.1"), opened) is None
    assert "has model.top_k = 1" in mismatch(config_of(f"{line} top_k=2"), opened)


def test_checkpoint_without_a_newer_key_matches_the_model(tmp_path):
    run_until(tmp_path, "serial", 1)
    opened = Checkpoint(tmp_path / "checkpoints" / "step-00000001")
    opened.header["config"], removed = re.subn("norm_epsilon = .*\n", "", opened.header["config"])
    assert removed and mismatch(config_of(LAYOUTS["serial"]), opened) is None


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_changed_optimizer_is_rejected_in_one_line(checkpoints, tmp_path):
    run_until(tmp_path, "serial", checkpoints)
    line = f"{LAYOUTS['serial']} steps=9"
    (tmp_path / "config.toml").write_text(to_toml(config_of(line)))
    with pytest.raises(ValueError) as refused:
        continued(tmp_path, config_of(f"{line} optimizer=muon"))
    assert str(refused.value) == (
        "train.optimizer = muon: the run used adamw so far, and its checkpoints do not contain "
        "the state of muon; set it to adamw, or start a new run"
    )
    continued(tmp_path, config_of(f"{line} optimizer=sgd"))


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_changed_model_is_rejected_in_one_line(checkpoints, tmp_path):
    run_until(tmp_path, "serial", checkpoints)
    line = f"{LAYOUTS['serial']} steps=9"
    (tmp_path / "config.toml").write_text(to_toml(config_of(line)))
    layers = config_of(line).model.layers
    with pytest.raises(ValueError) as refused:
        continued(tmp_path, config_of(f"{line} layers={layers + 1}"))
    assert str(refused.value) == (
        f"model.layers = {layers + 1}: the run used {layers} so far, and its checkpoints contain "
        f"this model; set it to {layers}, or start a new run"
    )


def test_changed_optimizer_without_checkpoints_reports_the_missing_checkpoint(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(config_of(LAYOUTS["serial"])))
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        continued(tmp_path, config_of(f"{LAYOUTS['serial']} optimizer=muon"))


@pytest.mark.parametrize(
    ("begun", "now", "said"),
    [
        ("", "beta1=0.8", ["train.beta1 was 0.9, is 0.8"]),
        ("beta2=0.99", "", ["train.beta2 was 0.99, is 0.95"]),
        ("", "epsilon=1e-8", []),  # what it was anyway
        ("", "optimizer=sgd", ["train.optimizer was adamw, is sgd"]),
        (
            "optimizer=muon",
            "optimizer=muon orthogonalize=sharded",
            ["train.orthogonalize was in-turn, is sharded"],
        ),
    ],
)
def test_changed_keys_are_reported_including_absent_ones(begun, now, said):
    before, after = (config_of(f"{LAYOUTS['serial']} {each}") for each in (begun, now))
    assert changes(before, after) == said


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run with a checkpoint of step 1, and the text of its config.toml."""
    run = tmp_path_factory.mktemp("saved")
    run_until(run, "serial", 1, steps=3)
    (run / "config.toml").write_text(to_toml(config_of(LAYOUTS["serial"])))
    return run, (run / "config.toml").read_text()


@pytest.mark.parametrize("kept", [0, 0.3, 0.5, 0.8, -1, -10])
def test_truncated_configuration_is_rejected(kept, saved):
    """The file is empty, cut between or within lines, or lacks its last line or a part of it."""
    run, text = saved
    cut = int(kept * len(text)) if kept >= 0 else kept - 1
    (run / "config.toml").write_text(text[:cut] if kept else "")
    with pytest.raises(ValueError) as refused:
        config_of_run(run, ["--train.steps", "9"])
    (line,) = lines_of(refused.value)
    assert line.startswith(str(run / "config.toml"))
    assert line.endswith("; remove config.toml to resume with the settings of step-00000001")


def test_a_configuration_that_is_a_folder_is_refused(saved):
    run, _ = saved
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()
    assert run_to_resume(["--resume", str(run)]) == run
    with pytest.raises(ValueError, match=r"is a folder.*; remove config.toml to resume with"):
        config_of_run(run, [])
    (run / "config.toml").rmdir()
    (run / "config.toml").touch()


def test_missing_configuration_is_restored_from_the_checkpoint(saved):
    run, _ = saved
    (run / "config.toml").unlink()
    assert run_to_resume(["--resume", str(run)]) == run
    assert config_of_run(run, []) == checkpointed_config(run)
    assert config_of_run(run, ["--train.batch=4"]).train.batch == 4


def test_edited_configuration_is_compared_with_the_checkpoint(saved):
    """A key without a value, such as parallel.split, may be missing in the file."""
    run, text = saved
    (run / "config.toml").write_text(text.replace("batch = 8", "batch = 4"))
    _, said = continued(run, config_of_run(run, []))
    assert said == ["train.batch was 8, is 4"]


def test_run_without_checkpoints_uses_its_configuration(tmp_path):
    """If the configuration is missing too, the error says that there is no checkpoint."""
    config = config_of(LAYOUTS["serial"])
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert config_of_run(tmp_path, []) == checkpointed_config(tmp_path) == config
    assert checkpointed_texts(tmp_path) == {}
    (tmp_path / "config.toml").unlink()
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        config_of_run(tmp_path, [])


def test_training_text_is_compared_with_the_checkpoint(saved):
    run, _ = saved
    path = run / "checkpoints" / "step-00000001" / "manifest.json"
    text = {"path": "/a.txt", "from_run": "../a.txt", "tokens": 9, "sha256": "0"}
    header = json.loads(path.read_text()) | {"texts": {"data.path": text}}
    path.write_text(json.dumps(header))
    assert checkpointed_texts(run) == {"data.path": text}
    config = checkpointed_config(run)
    assert continued(run, config, texts={"data.path": text})[1] == []
    _, (line,) = continued(run, config, texts={"data.path": {**text, "sha256": "1"}})
    assert line.startswith("data.path: ")


def test_fraction_that_was_not_held_out_is_rejected(saved):
    run, _ = saved
    path = run / "checkpoints" / "step-00000001" / "manifest.json"
    config = config_of(f'{LAYOUTS["serial"]} validation=\'["/a", "/b"]\'')
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": to_toml(config)}))
    with pytest.raises(ValueError, match=r"= 0\.1: it was \['/a', '/b'\] so far, .*; use a sepa"):
        continued(run, config_of(f"{LAYOUTS['serial']} validation=0.1"))
