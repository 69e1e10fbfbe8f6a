"""Option and key names of other programs."""

import pytest

from hpc3d.config.familiar_names import FAMILIAR, familiar
from hpc3d.config.load import known_keys, load
from tests.config.refused import problems


def test_every_familiar_name_maps_to_existing_keys():
    known = {*known_keys()}
    for name, said in FAMILIAR.items():
        keys = [word.strip(",;()") for word in said.split() if word.count(".") == 1]
        assert keys and known.issuperset(keys), name


def test_familiar_names_do_not_shadow_our_keys():
    ours = {key.rpartition(".")[2] for key in known_keys()}
    assert ours & FAMILIAR.keys() == {"backend"}  # its advice names train.backend


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr 1", "lr: unknown key; use train.learning_rate"),
        ("--train.lr 1", "train.lr: unknown key; use train.learning_rate"),
        ("--n-layer 1", "n-layer: unknown key; use model.layers"),
        ("--model.block_size 1", "model.block_size: unknown key; use model.sequence"),
        (
            "--bias=False",
            "bias: unknown key; model.kind decides: gpt2 always has biases, and llama has none "
            "unless model.attention_bias or model.mlp_bias is true",
        ),
        (
            "--backend=nccl",
            "backend: unknown key; remove it, because hpc3d selects NCCL or MPI automatically "
            "(mesh.transport); train.backend selects numpy or cupy arrays",
        ),
        ("--train_file a", "train_file: unknown key; use data.path"),
        ("--validation_file a", "validation_file: unknown key; use data.validation"),
        (
            "--model_name_or_path gpt2",
            "model_name_or_path: unknown key; use the option --resume RUN_DIR, with a run that "
            "has checkpoints (checkpoint.every); to start from a Hugging Face model, first run "
            "hpc3d checkpoint import",
        ),
        (
            "--deepspeed a.json",
            "deepspeed: unknown key; use the keys of hpc3d instead of a DeepSpeed configuration, "
            "such as parallel.zero for the ZeRO stage",
        ),
        ("--train.stepz 1", "train.stepz: unknown key; did you mean train.steps?"),
    ],
)
def test_option_names_of_other_programs_suggest_our_keys(words, said):
    assert problems(*words.split()) == [said]


def test_file_keys_of_other_programs_suggest_our_keys(tmp_path):
    said = problems(text="[model]\nn_embd = 64\n", folder=tmp_path)
    assert said == ["model.n_embd: unknown key; use model.hidden"]


def test_nested_tables_of_other_programs_get_a_suggestion_per_key():
    """The tables are those of torchtitan and DeepSpeed; tables suggest tables, not keys."""
    deep = ["--optimizer.params", "{lr=1,betas=[0.9,0.95],name='x'}", "--trainer.max_steps", "3"]
    optimizer, *keys, trainer, steps = problems(*deep, "--trainer.seed", "1")
    assert optimizer.startswith("optimizer: unknown key; use one of mesh, parallel, ")
    assert keys == [
        "optimizer.params.lr: unknown key; use train.learning_rate",
        "optimizer.params.betas: unknown key; use train.beta1 and train.beta2",
    ]
    assert trainer == "trainer: unknown key; did you mean train?"
    assert steps == "trainer.max_steps: unknown key; use train.steps"


def test_converted_sizes_are_reported_with_their_equation():
    (said,) = problems("--mesh.tp", "1")
    assert said.startswith("mesh.tp: unknown key; use mesh.x, mesh.y and mesh.z; their product ")
    (said,) = problems("--micro_batch_size", "4")
    assert said.endswith("this value x parallel.microbatches x mesh.d x mesh.e")


def test_unknown_name_has_no_suggestion():
    assert familiar("entropy") is None
    assert load(None, ["--train.learning_rate", "1"]).train.learning_rate == 1
