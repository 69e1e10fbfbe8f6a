"""`python -m hpc3d.generate`: output on one and several ranks, and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from hpc3d import generate
from hpc3d.checkpoints.hf_export import export
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.console.sanitize import Problems
from hpc3d.generate import parser
from tests.checkpoints import drawn_models
from tests.elided import elided
from tests.mpi import JOB_LOCK, launching, mpirun, started
from tests.runs import said
from tests.strided import strided

MODEL = "kind=llama kv_heads=4 ffn=48 vocabulary=256 sequence=9 layers=2 batch=16 dtype=float32"
TRAINED_ON = "p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=1"
LAYOUTS = """
1d --mesh.x 4
1d-sequence --mesh.x 4
2d --mesh.x 2 --mesh.y 2
2d-summa --mesh.x 2 --mesh.y 2
2.5d --mesh.x 2 --mesh.y 2 --mesh.z 2
3d --mesh.x 2 --mesh.y 2 --mesh.z 2
3d-broadcast --mesh.x 2 --mesh.y 2 --mesh.z 2
""".strip().splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run on eight ranks, with stages and replicas."""
    folder = tmp_path_factory.mktemp("run")
    drawn_models.saved(folder, f"{TRAINED_ON} {MODEL}", 3)
    return folder


@pytest.fixture(scope="module")
def endless(run):
    """The same model as files of transformers, without an end token."""
    export(Checkpoint(run / "checkpoints" / "step-00000003"), run / "theirs")
    return run / "theirs"


def words(folder, *more, prompt="The ", tokens=25):
    return ["-m", "hpc3d.generate", folder, "--prompt", prompt, "--tokens", tokens, *more]


def alone(*arguments, **how):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


@pytest.fixture(scope="module")
def expected(run):
    """Output of one rank."""
    done = alone(*words(run))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_goes_to_stdout_and_messages_to_stderr(run, expected):
    assert expected.startswith("The ") and expected.endswith("\n")
    done = alone(*words(run, "--json"))
    text, _, last = done.stdout.removesuffix("\n").rpartition("\n")
    assert f"{text}\n" == expected
    found = json.loads(last)
    (sample,) = found["samples"]
    assert (len(sample["tokens"]), sample["ended"], found["stopped_by"]) == (25, False, "tokens")
    assert bytes(sample["tokens"]).decode("utf-8", "replace") == sample["text"]
    assert found["prompt"] == "The "
    (line,) = said(done)
    assert re.fullmatch(elided("hpc3d.generate: ...: llama on one rank, float64"), line)


def test_prompt_longer_than_the_window_is_reported_as_truncated(run):
    done = alone(*words(run, prompt="The " * 50, tokens=1))
    assert "the prompt has 200 tokens, of which the model reads the last" in done.stderr


LAST_DOCUMENT = (
    "hpc3d.generate: the model reads only the last 3 tokens of the prompt, because token 10 ends "
    "a document (data.boundaries = true)"
)


def test_prompt_that_ends_a_document_starts_a_new_one(tmp_path):
    """The first new token is the prompt of the second call."""
    drawn_models.saved(tmp_path, f"schedule=none {MODEL} boundaries=true separator=10")

    def tokens(prompt):
        done = alone(*words(tmp_path, "--temperature", 0, "--json", prompt=prompt, tokens=6))
        reported = [line for line in said(done) if "reads only the last" in line]
        assert reported == ([LAST_DOCUMENT] if prompt == "a\nab\n" else [])
        return json.loads(done.stdout.splitlines()[-1])["samples"][0]["tokens"]

    first, *others = tokens("ab\n")
    assert tokens(os.fsdecode(bytes([first])))[:5] == others
    assert tokens("a\nab\n") == [first, *others]


@pytest.mark.slow
def test_different_seed_generates_different_text(run, expected):
    assert alone(*words(run, "--seed", 7)).stdout != expected


@pytest.mark.slow
def test_several_samples_are_printed_in_sequence(run):
    done = alone(*words(run, "--samples", 2, "--json"))
    *text, last = done.stdout.splitlines()
    first, second = json.loads(last)["samples"]
    assert first["text"] != second["text"]
    assert text[0] == "=== 1 of 2" and "=== 2 of 2" in text


def test_prompt_is_read_from_standard_input(run, expected):
    assert alone(*words(run, prompt="-"), input="The ").stdout == expected


def test_transformers_folder_generates_the_same_text(endless, expected):
    assert alone(*words(endless)).stdout == expected


def test_closed_output_pipe_ends_generation(endless):
    command = [sys.executable, *map(str, words(endless, tokens=10**6))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"T"
        process.stdout.close()
        assert process.wait(60) == 0
        assert b"Traceback" not in process.stderr.read()


def test_all_options_with_wrong_values_are_reported():
    with pytest.raises(Problems) as refused:
        parser().parse_args(["run", "--tokens", "0", "--top-p", "2", "--seed", "x"])
    options = "--tokens", "--top-p", "--seed", "--prompt"
    assert all(map(str.__contains__, refused.value.lines, options))
    assert len(refused.value.lines) == len(options)


def test_options_of_other_programs_suggest_ours():
    """The options are those of nanoGPT and transformers."""
    given = ["run", "--start", "a", "--max-new-tokens=9", "--top_k=5", "--do_sample", "--top-p=1"]
    with pytest.raises(Problems) as refused:
        generate._prepare(None, [*given, "--prompt=--top_k"])
    assert refused.value.lines == [
        "--start: unknown option; use --prompt",
        "--max-new-tokens: unknown option; use --tokens",
        "--top_k: unknown option; use --top-k",
        "--do_sample: unknown option; tokens are sampled; use --temperature 0 for greedy decoding",
    ]


def test_ctrl_c_ends_generation_with_the_text_so_far(endless):
    command = [sys.executable, *map(str, words(endless, tokens=10**6))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=250)
    assert process.returncode == 128 + signal.SIGINT
    assert begun.startswith("The ") and rest.endswith("\n")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "more",
    [
        ["--promt", "x"],
        ["--top-p", "2"],
        ["--temperature", "nan"],
        ["--model.hidden", "8"],
        ["--mesh.p", "2"],
        ["--mesh.order", "x"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_invalid_options_are_rejected_in_one_line(run, more):
    done = alone(*words(run, *more))
    assert done.returncode == 2 and not done.stdout
    (line,) = said(done)
    assert more[0].removeprefix("--") in line


@pytest.mark.slow
@pytest.mark.parametrize("layout", strided(LAYOUTS, 2))
def test_every_layout_on_mpi_ranks_prints_the_same_text(layout, run, expected):
    scheme, *mesh = layout.split()
    ranks = 8 if len(mesh) == 6 else 4
    done = mpirun(ranks, *words(run, "--parallel.scheme", scheme, *mesh))
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    (line,) = said(done)
    assert f"scheme {scheme}" in line


@pytest.mark.slow
def test_mixture_generates_the_same_text_from_run_export_and_ranks(tmp_path):
    """Tests a run whose experts dropped tokens, and its export to transformers."""
    mixture = "e=2 x=2 microbatches=2 experts=4 top_k=2 capacity=0.5"
    folder = drawn_models.saved(tmp_path / "run", f"{mixture} {MODEL}")
    export(Checkpoint(folder), theirs := tmp_path / "theirs")
    expected = alone(*words(folder)).stdout
    assert len(expected) > 20 and alone(*words(theirs)).stdout == expected
    done = mpirun(4, *words(folder, "--parallel.scheme", "2d-summa", "--mesh.x", 2, "--mesh.y", 2))
    assert done.stdout == expected, done.stderr


@pytest.mark.slow
def test_ranks_without_a_layout_use_the_best_one_and_reject_together(run, expected, tmp_path):
    done = launching(*words(run, "--launch", 4))
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    done = launching(*words(tmp_path / "none", "--launch", 3))
    assert done.returncode == 2 and len(said(done)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", "rank 0"])
def test_ctrl_c_ends_all_ranks(to, endless):
    with JOB_LOCK:
        process = started(4, *words(endless, tokens=10**6))
        begun = process.stdout.read(20)
        if to == "launcher":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(rank_0(process), signal.SIGINT)
        rest, error = process.communicate(timeout=250)
    assert process.returncode  # 1 of Open MPI 5, whatever its ranks' are
    assert begun.startswith("The ") and "Traceback" not in error
    if to == "rank 0":
        assert process.returncode == 130 and rest.endswith("\n")


def rank_0(process):
    """Return the process of rank 0 of a launcher."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    return min(map(int, found.stdout.split()))
