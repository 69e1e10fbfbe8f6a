"""The lower bound on a run's memory is at most the simulated memory, and close to it."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc3d import train
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from hpc3d.runtime import host_memory
from hpc3d.training.footprint import least, refuse_what_cannot_fit

INPUTS = Path(__file__).parents[2] / "inputs"
LINE = {"x": 8, "y": 1, "z": 1}
LAYOUTS = {
    "cube": {},
    "one rank": {"mesh": {"x": 1, "y": 1, "z": 1}},
    "1d": {"mesh": LINE, "parallel": {"scheme": "1d"}},
    "full": {"parallel": {"recompute": "full"}, "model": {"layers": 8}},
    "some layers": {"parallel": {"recompute": "[0, 5]"}, "model": {"layers": 8}},
    "selective": {"parallel": {"recompute": "selective"}},
    "modules": {"parallel": {"recompute": '["core_attn","layernorm","mlp"]'}},
    "summa": {"mesh": {"z": 1}, "parallel": {"scheme": "2d-summa"}},
    "zero 1": {"mesh": {"p": 2, "d": 2}, "parallel": {"zero": 1}},
    "sgd": {"train": {"optimizer": "sgd"}, "model": {"layers": 4}},
    "zero 3": {"mesh": {"p": 2, "d": 2, "z": 1}, "parallel": {"microbatches": 4, "zero": 3}},
    "long": {"model": {"sequence": 256}},
    "experts": {
        "mesh": {"e": 4, "z": 1},
        "model": {"experts": 8, "top_k": 2, "capacity": 1, "moe_every": 2, "shared_experts": 1},
    },
    "experts, zero 3": {
        "mesh": {"d": 2, "e": 2, "z": 1},
        "parallel": {"zero": 3, "recompute": "selective"},
        "model": {"experts": 8, "capacity": 0},
    },
    "16 bits": {"train": {"dtype": "bfloat16"}, "model": {"layers": 6}},
    "16 bits, zero 2": {
        "mesh": {"d": 4, "z": 1},
        "parallel": {"zero": 2},
        "train": {"dtype": "float16", "optimizer": "lion"},
    },
    "powersgd": {
        "mesh": {"d": 4, "z": 1},
        "parallel": {"zero": 1, "microbatches": 3, "compression": "powersgd"},
        "model": {"layers": 8},
    },
    "top-k, 16 bits": {
        "mesh": {"d": 4, "z": 1},
        "parallel": {"compression": "top-k", "compression_share": 0.01},
        "train": {"dtype": "bfloat16"},
        "model": {"layers": 8},
    },
    "offloaded": {
        "parallel": {"offload": '["optimizer","parameters"]', "microbatches": 12},
        "train": {"dtype": "bfloat16"},
    },
    "long, offloaded": {
        "parallel": {"offload": '["activations"]'},
        "model": {"sequence": 256},
    },
    "vocabulary": {"parallel": {"microbatches": 12}, "model": {"vocabulary": 32000}},
}


def config_of(changes):
    words = [
        word
        for section, values in changes.items()
        for key, value in values.items()
        for word in (f"--{section}.{key}", str(value))
    ]
    return load_resolved(INPUTS / "gpt-3d-64.toml", words)


@pytest.mark.parametrize("name", LAYOUTS)
def test_footprint_is_a_close_lower_bound(name):
    config, machine = config_of(LAYOUTS[name]), load(INPUTS / "machines" / "h100.toml")
    runs = simulate(config, config.model.vocabulary, machine)
    peak = sum(run.peak["all"] for run in runs) / len(runs)
    assert 0.2 * peak < least(config) < peak


def test_run_that_exceeds_node_memory_is_rejected(monkeypatch):
    config = config_of({})
    need = 64 * least(config)
    monkeypatch.setattr(host_memory, "total", lambda: need)
    refuse_what_cannot_fit(config, 64)
    gpu = replace(config, train=replace(config.train, backend="cupy"))
    refuse_what_cannot_fit(gpu, 6400)
    with pytest.raises(ValueError) as caught:
        refuse_what_cannot_fit(config, 65)
    line = str(caught.value)
    assert line.startswith("model and train: 65 ranks ")
    assert f" {need / 1e9:.4g} GB; " in line and "hpc3d.plan" in line


def test_oversized_model_is_rejected_before_a_folder_exists(tmp_path):
    words = ["--model.hidden", "1048576", "--model.heads", "64", "--run.out", str(tmp_path)]
    plan = train.read_command_line(1, words)
    train.take_text(plan)
    with pytest.raises(ValueError, match=r"1 rank .* GB, .* GB; "):
        train.checked_program(plan.config)
    assert not [*tmp_path.iterdir()]


def test_offloading_requires_an_existing_tmpdir(monkeypatch, tmp_path):
    config = load_resolved(None, ["--parallel.offload", '["optimizer"]'], 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    refuse_what_cannot_fit(config, 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"^parallel\.offload: TMPDIR = "):
        refuse_what_cannot_fit(config, 1)
