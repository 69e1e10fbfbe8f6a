"""Continue a text with a trained model.

    python -m hpc3d.generate RUN_DIR|FOLDER --prompt TEXT|- [--tokens N] [--launch N] ...
    mpirun -np N python -m hpc3d.generate RUN_DIR|FOLDER --prompt TEXT [--section.key value ...]

RUN_DIR is a checkpoint, or a run folder, whose newest complete checkpoint is used. FOLDER is a
Hugging Face Transformers model: config.json, safetensors files and, optionally, tokenizer.json.
The text is written to standard output as it is generated, and everything else to standard error.

On N ranks, tensor axes split the model as in training. Set them as in an input file:
--mesh.x 2 --parallel.scheme 2d. By default, the mesh of the run is used if it has N ranks, and
otherwise the 3D mesh with the least communication. By default, the model is evaluated in float64
(--train.dtype), so that a seed gives the same text on every layout.

The context is limited to model.sequence tokens. When it is full, the older half is dropped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.config.argument_types import integer, number_of_ranks, positive, ranks_taken, real
from hpc3d.config.familiar_names import foreign_options
from hpc3d.console.command_line import Parser, RootParser, split_options
from hpc3d.console.exit_codes import INTERRUPTED, JobExit
from hpc3d.console.sanitize import counted
from hpc3d.runtime import environment, launch, mpi_launcher

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.config.input_file import Config
    from hpc3d.generation.continuation import TextRequest
    from hpc3d.generation.samples import Samples
    from hpc3d.generation.trained_model import TrainedModel, WeightSource
    from hpc3d.model.decoder import Decoder
    from hpc3d.runtime.job import Job

_EXITS = (
    "exit codes: 0 success, 2 invalid input (explained on standard error), 130 stopped by Ctrl-C"
)
_MOST_SAMPLES = 4096
_MOST_SEED = 2**64 - 1


class _Plan(NamedTuple):
    """Inputs of text generation that are identical on all ranks."""

    config: Config
    source: WeightSource
    wanted: TextRequest


class _Reading(NamedTuple):
    """Options, model and prompt read by rank 0, and the `_Plan` that rank 0 broadcasts."""

    options: Namespace
    model: TrainedModel
    prompt: str
    plan: _Plan


class _Screen:
    """Standard output of rank 0, which also detects a closed pipe and Ctrl-C."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def write(self, text: str) -> None:
        """Print a text, escaping all terminal control characters except tabs."""
        for part in re.split("(\t)", text):
            sys.stdout.write(part)
        sys.stdout.flush()

    def interrupted(self) -> bool:
        return signal.SIGINT in self.job.signals

    def unwanted(self) -> bool:
        """Return True if the reader has closed the pipe or the user has pressed Ctrl-C."""
        return sys.stdout.unread or self.interrupted()


def main(argv: Sequence[str] | None = None) -> int:
    words = [*(sys.argv[1:] if argv is None else argv)]
    if {"-h", "--help"} & {*words}:
        return launch.show_help("generate", parser().print_help)
    wanted = partial(ranks_taken, words, "--launch")
    return mpi_launcher.run("generate", words, lambda job: generate(job, words), wanted)


def generate(job: Job, words: list[str]) -> None:
    """Run the command `generate` on one rank of the job."""
    from hpc3d.generation.continuation import continue_text

    job.requests = {signal.SIGINT}
    opened = job.on_root(lambda: _prepare(job, words))
    plan = job.from_root(lambda: opened.plan)
    decoder = _decoder(job, plan)
    screen, samples, choose = _Screen(job), None, None
    if opened:
        samples = _samples(opened, screen)
        choose = samples.choose
    continue_text(decoder, plan.wanted, choose)
    if job.from_root(lambda: _conclude(opened, samples, screen)):
        raise JobExit(INTERRUPTED)


def _prepare(job: Job, words: Sequence[str]) -> _Reading:
    """Read the command line, the model and the prompt on rank 0.

    Raises ValueError if one of them is invalid.
    """
    from hpc3d.generation.continuation import TextRequest
    from hpc3d.generation.standard_input import standard_input
    from hpc3d.generation.tensor_layout import described, laid_out
    from hpc3d.generation.trained_model import find_model, layout_words

    ours, settings = split_options(words)
    command = parser()
    if problems := foreign_options(ours):
        command.refuse(problems)
    options = command.parse_args(ours)
    model = find_model(options.model, settings)
    config = laid_out(model.config, layout_words(settings), job.size, options.samples)
    for line in (*model.notes, f"{model.source.path}: {described(config)}"):
        job.complain(line)
    text = os.fsencode(options.prompt)
    if options.prompt == "-":
        text = standard_input(environment.number_in(environment.WORLD_RANKS, default=0) > 0)
    ids, window = model.prompt(text), config.model.sequence
    prompt = model.last_document(ids)
    if len(prompt) < len(ids):
        job.complain(
            f"the model reads only the last {counted(len(prompt), 'token')} of the prompt, "
            f"because token {model.separator} ends a document (data.boundaries = true)"
        )
    if len(prompt) > window:
        line = f"the prompt has {len(prompt)} tokens, of which the model reads the last {window}"
        job.complain(line)
    ended = bool(prompt[-1] == model.separator)
    wanted = TextRequest(prompt, options.samples, config.train.batch, options.tokens, ended)
    plan = _Plan(config, model.source, wanted)
    return _Reading(options, model, text.decode("utf-8", "replace"), plan)


def _decoder(job: Job, plan: _Plan) -> Decoder:
    """Build this rank's shard of the model and load its parameters."""
    from hpc3d.checkpoints.sharded import restore
    from hpc3d.comm.device_setup import mesh_of
    from hpc3d.model.decoder import Decoder
    from hpc3d.training.trainer import spec_of

    config = plan.config
    mesh = mesh_of(job, config)
    values = job.on_all_ranks(lambda: plan.source.open(config))
    spec = spec_of(config, config.model.vocabulary)
    capacity = plan.wanted.capacity(config.model.sequence)
    decoder = Decoder(mesh, spec, config.train.dtype, capacity)
    job.on_all_ranks(lambda: restore(values, decoder.parameters, None))
    return decoder


def _samples(opened: _Reading, screen: _Screen) -> Samples:
    """Create the token sampler on rank 0. If there is only one sample, print the prompt first."""
    from hpc3d.generation.samples import Samples
    from hpc3d.generation.sampling import Sampling

    options = opened.options
    how = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    if options.samples == 1:
        screen.write(opened.prompt)
    return Samples(opened.model, how, options.samples, screen.write, screen.unwanted)


def _conclude(opened: _Reading, samples: Samples, screen: _Screen) -> bool:
    """Print the remaining output on rank 0; return True if the user has pressed Ctrl-C."""
    samples.finish(opened.prompt)
    if opened.options.json:
        screen.write(json.dumps(_result(opened, samples)) + "\n")
    return screen.interrupted()


def _result(opened: _Reading, samples: Samples) -> Mapping[str, Any]:
    config, options = opened.plan.config, opened.options
    return {
        "model": str(opened.model.source.path),
        "mesh": {axis: size for axis, size in config.mesh.sizes().items() if size > 1},
        "dtype": config.train.dtype,
        **{key: getattr(options, key) for key in ("temperature", "top_k", "top_p", "seed")},
        "prompt": opened.prompt,
        "samples": samples.results(),
        "stopped_by": samples.reason,
    }


def parser() -> Parser:
    """Return the command-line parser."""
    usage = "%(prog)s RUN_DIR|FOLDER --prompt TEXT|- [options] [--section.key value ...]"
    command = RootParser("generate", __doc__, _EXITS, usage=usage)
    add = command.add_argument
    text = "run folder, checkpoint, or folder of a Hugging Face Transformers model"
    add("model", type=Path, metavar="RUN_DIR|FOLDER", help=text)
    text = "text to continue, which may contain special tokens; - reads standard input"
    add("--prompt", required=True, metavar="TEXT", help=text)
    add("--tokens", type=positive, default=200, help="maximum number of new tokens (default: 200)")
    text = "sampling temperature; 0 selects the most likely token (default: 1)"
    temperature = real(lambda t: 0 <= t <= 1e6, "must be from 0 to 1e+06")
    add("--temperature", type=temperature, default=1.0, help=text)
    text = "sample from the K most likely tokens (default: all)"
    add("--top-k", type=positive, default=0, help=text)
    text = "sample from the smallest set of most likely tokens whose total probability is "
    text += "at least P (default: 1)"
    probability = real(lambda p: 0 <= p <= 1, "must be from 0 to 1")
    add("--top-p", type=probability, default=1.0, help=text)
    add("--seed", type=integer(0, _MOST_SEED), default=1234, help="random seed (default: 1234)")
    text = "number of continuations (default: 1)"
    add("--samples", type=integer(1, _MOST_SAMPLES), default=1, help=text)
    add("--json", action="store_true", help="print one JSON object on the last line")
    add("--launch", type=number_of_ranks, metavar="N", help=mpi_launcher.LAUNCH_HELP)
    return command


if __name__ == "__main__":
    sys.exit(main())
