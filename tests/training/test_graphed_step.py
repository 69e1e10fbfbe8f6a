"""Which training steps are captured in a CUDA graph, and the reasons why others are not."""

import re

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.training.graphed_step import captured, graph_in_words, settled
from hpc3d.training.log import layout_lines
from tests.elided import elided

BASE = "--train.backend cupy --train.cuda_graph true --train.batch 16"
HALF = "--train.dtype bfloat16 --model.sequence"
CAPTURED = [
    "",
    "--mesh.p 4 --parallel.microbatches 8 --model.layers 4",
    "--mesh.c 2",
    f"--mesh.c 2 {HALF} 512",
    f"--mesh.c 2 --parallel.context all-to-all {HALF} 128",
    f"{HALF} 64 --model.dropout 0.1",
    f"{HALF} 64 --data.boundaries true",
    f"{HALF} 128 --model.kind bert --model.padding 0",
    f"{HALF} 64 --model.kind gemma2 --model.score_cap 50",
    "--model.experts 4 --model.capacity 4",
    '--parallel.offload ["optimizer"]',
    "--train.dtype float16 --model.sequence 256 --mesh.d 4 --parallel.zero 3",
    "--mesh.d 4 --mesh.transport nccl",
    "--mesh.transport host-staged",  # of one rank, which communicates with no other
]
PIPEDREAM = "--mesh.p 2 --parallel.schedule pipedream-2bw --parallel.microbatches 2"
LAUNCHED = {
    "--train.cuda_graph false": "train.cuda_graph = false",
    "--mesh.d 2 --mesh.transport host-staged": "transport host-staged ...transport = nccl ...",
    PIPEDREAM: "... pipedream-2bw overlap; use a synchronous schedule",
    "--mesh.d 2 --parallel.compression powersgd": "...(parallel.compression = powersgd) ...",
    '--parallel.offload ["optimizer","activations"]': '... activations ... ["optimizer"]',
    "--model.experts 4 --model.capacity 0": "... model.capacity = 0, ... model.capacity = 4 ...",
    f"{HALF} 64": "... model.sequence = 64 ... use a multiple of 128",
    f"{HALF} 64 --parallel.attention chunked": "... use a multiple of 128",
    f"{HALF} 64 --model.kind bert --model.padding 0": "... use a multiple of 128",
    f"--mesh.c 2 {HALF} 128": "... model.sequence = 128 ... use a multiple of 512 ...",
}


def config_of(words):
    given = dict(zip(*[iter(f"{BASE} {words}".split())] * 2, strict=True))
    config = load(None, [part for item in given.items() for part in item])
    mesh = config.mesh
    return resolve(config, mesh.p * mesh.d * mesh.c)


@pytest.mark.parametrize("words", CAPTURED)
def test_passes_of_these_settings_are_captured(words):
    config = config_of(words)
    assert captured(config) and settled(config, "nccl") == config
    assert graph_in_words(config).startswith("one launch for the forward and backward passes")


@pytest.mark.parametrize("words", LAUNCHED)
def test_reason_why_a_step_is_launched_is_logged(words):
    config = config_of(words)
    assert not captured(config) and not settled(config, config.mesh.transport).train.cuda_graph
    line = [*layout_lines(config)][-1]
    assert re.fullmatch(elided(f"CUDA graph: none, because {LAUNCHED[words]}"), line), line


def test_transport_of_a_run_decides():
    config = config_of("--mesh.d 2")
    assert settled(config, "nccl").train.cuda_graph
    assert not settled(config, "mpi").train.cuda_graph
    assert [*layout_lines(config, "mpi")][-1].startswith("CUDA graph: none, because transport mpi")


def test_cpus_have_no_graph_to_report():
    config = resolve(load(None, []), 1)
    assert not captured(config)
    assert not any("CUDA" in line for line in layout_lines(config))
