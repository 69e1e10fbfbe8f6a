"""Measure the loss of a trained model on held-out text.

    python -m hpc3d.evaluate RUN_DIR|CHECKPOINT|FOLDER --data FILE ... [--batches B] [--launch N]
    mpirun -np N python -m hpc3d.evaluate RUN_DIR|CHECKPOINT|FOLDER --data FILE ...

RUN_DIR is a run folder, whose newest complete checkpoint is used. FOLDER is a Hugging Face
Transformers model: config.json and safetensors files. Nothing is trained, and no optimizer state
is loaded. FILE is a text file, a folder of *.txt files, or a token file. The command prints one
row per FILE: mean loss per token in nats, perplexity, bits per byte, accuracy and tokens per
second.

Every token of FILE is evaluated exactly once, unless --batches limits their number. The text is
split into windows of model.sequence tokens, and the first token of the text only serves as input.

On N ranks, all forms of parallelism can be used. Set them as in an input file: --mesh.d 2
--parallel.zero 3. By default, the mesh of the run is used if it has N ranks, and otherwise the 3D
mesh with the least communication. The result does not depend on the layout, except for rounding;
--train.dtype float64 makes the rounding negligible. --train.batch sets the number of sequences per
batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.config.argument_types import Joined, number_of_ranks, positive, ranks_taken
from hpc3d.console.command_line import Parser, RootParser, split_options
from hpc3d.console.sanitize import sanitized
from hpc3d.runtime import launch, mpi_launcher

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.config.input_file import Config
    from hpc3d.data.validation import SeparateText, ValidationBatches
    from hpc3d.generation.trained_model import FoundWeights, WeightSource
    from hpc3d.runtime.job import Job
    from hpc3d.training.evaluator import Evaluation, FrozenModel

_EXITS = "exit codes: 0 success, 1 a rank failed, 2 invalid input (explained on standard error)"


class _EvaluationPlan(NamedTuple):
    """Inputs of an evaluation that are identical on all ranks."""

    config: Config
    source: WeightSource
    files: list[str]


class _OpenedTexts(NamedTuple):
    """Options and texts that rank 0 has opened, and the `_EvaluationPlan` that it broadcasts."""

    options: Namespace
    plan: _EvaluationPlan
    texts: list[SeparateText]
    batches: list[ValidationBatches]


def main(argv: Sequence[str] | None = None) -> int:
    words = [*(sys.argv[1:] if argv is None else argv)]
    if {"-h", "--help"} & {*words}:
        return launch.show_help("evaluate", parser().print_help)
    wanted = partial(ranks_taken, words, "--launch")
    return mpi_launcher.run("evaluate", words, lambda job: evaluate(job, words), wanted)


def evaluate(job: Job, words: list[str]) -> None:
    """Run the command `evaluate` on one rank of the job."""
    from hpc3d.training.evaluator import FrozenEvaluator

    with ExitStack() as texts:
        opened = job.on_root(lambda: _prepare(job, words, texts))
        plan = job.from_root(lambda: opened.plan)
        with job.progress("loading the weights"):
            model = _model(job, plan)
        found = []
        for number, name in enumerate(plan.files):
            with job.progress(f"evaluating {name}"):
                evaluator = FrozenEvaluator(model, opened and [opened.batches[number]])
                found.append(evaluator.evaluate(0))
    job.from_root(lambda: _show(opened, found))


def _prepare(job: Job, words: Sequence[str], texts: ExitStack) -> _OpenedTexts:
    """Read the command line, find the model and open the texts on rank 0.

    `texts` closes the texts. Raises ValueError if one of them is invalid.
    """
    from hpc3d.generation.evaluation_layout import ACCEPTED, evaluation_layout
    from hpc3d.generation.tensor_layout import described
    from hpc3d.generation.trained_model import (
        DOCUMENTS,
        find_weights,
        is_published,
        refuse_others,
        words_with,
    )
    from hpc3d.runtime.environment import LOCAL_RANKS, number_in
    from hpc3d.training.footprint import refuse_what_cannot_fit

    ours, settings = split_options(words)
    command = parser()
    options, others = command.parse_known_args(ours)
    if others:
        command.error(
            f"unrecognized arguments: {' '.join(others)}; specify one model, and texts by --data"
        )
    path = options.model
    model = ("model.", *DOCUMENTS) if is_published(path) else ()
    refuse_others("evaluate", settings, (*ACCEPTED, *model))
    found = find_weights("evaluate", path, settings)
    config = evaluation_layout(found.config, words_with(settings, ACCEPTED), job.size)
    config = replace(config, train=replace(config.train, eval_batches=options.batches or 0))
    refuse_what_cannot_fit(config, number_in(LOCAL_RANKS, default=1), training=False)
    pairs = [_open_text(path, found, config, file, texts) for file in options.data]
    config = _with_separator(path, config, [text for text, _ in pairs])
    for line in (*found.notes, f"{found.source.path}: {described(config)}"):
        job.complain(line)
    plan = _EvaluationPlan(config, found.source, [*map(str, options.data)])
    return _OpenedTexts(options, plan, *map(list, zip(*pairs, strict=True)))


def _with_separator(path: Path, config: Config, texts: Sequence[SeparateText]) -> Config:
    """Return `config` with the token that ends the documents of all `texts`.

    Raises ValueError if the documents of a text do not end with the separator of the model at
    `path`, or if the separator is unknown.
    """
    from hpc3d.checkpoints.run_tokenizer import kept_tokenizer
    from hpc3d.data.documents import refuse_other_end
    from hpc3d.data.validation import naming_key

    end = texts[0].end()
    if config.data.separator is not None:
        kept = kept_tokenizer(path)
        end = kept.end if kept else None
    data = config.data.with_separator(end, config.model.vocabulary)
    if data.boundaries and data.separator is not None:
        with naming_key("--data"):
            for text in texts:
                refuse_other_end(text, data.separator, end)
    return replace(config, data=data)


def _open_text(
    path: Path, found: FoundWeights, config: Config, file: Path, texts: ExitStack
) -> tuple[SeparateText, ValidationBatches]:
    """Open a text on rank 0; return it and its batches.

    Raises ValueError if the text does not fit the model at `path`.
    """
    from hpc3d.checkpoints.run_tokenizer import advise_tokenizer, refuse_another
    from hpc3d.config import package_data
    from hpc3d.data.validation import SeparateText, naming_key
    from hpc3d.training.masking import validation_of

    with advise_tokenizer(path):
        text = texts.enter_context(SeparateText(package_data.text_path(file), "--data"))
    with naming_key(f"--data {file}"):
        refuse_another(path, text, config.model, found.config.data.tokenizer)
        return text, validation_of(config, text, remainder=True)


def _model(job: Job, plan: _EvaluationPlan) -> FrozenModel:
    """Build this rank's shard of the model and load its parameters."""
    from hpc3d.checkpoints.sharded import restore
    from hpc3d.comm.device_setup import mesh_of
    from hpc3d.training.evaluator import FrozenModel

    mesh = mesh_of(job, plan.config)
    values = job.on_all_ranks(lambda: plan.source.open(plan.config))
    model = FrozenModel(mesh, plan.config)
    job.on_all_ranks(lambda: restore(values, model.parameters, None))
    return model


def _show(opened: _OpenedTexts, found: Sequence[Evaluation]) -> None:
    """Print the results on rank 0."""
    plan, config = opened.plan, opened.plan.config
    rows = [
        _row(name, text, each, config)
        for name, text, each in zip(plan.files, opened.texts, found, strict=True)
    ]
    print(*map(sanitized, _table(rows)), sep="\n", flush=True)
    if opened.options.json:
        told = {
            "model": str(plan.source.path),
            "mesh": {axis: size for axis, size in config.mesh.sizes().items() if size > 1},
            "dtype": config.train.dtype,
            "batch": config.train.batch,
            "sequence": config.model.sequence,
            "files": rows,
        }
        print(json.dumps(told, allow_nan=False), flush=True)


def _row(name: str, text: SeparateText, found: Evaluation, config: Config) -> dict[str, Any]:
    """Return the results for a file; unknown and non-finite values are `None`."""
    values = {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": bits_per_byte(found.loss, text, config),
        "accuracy": found.accuracy,
        "tokens": found.tokens,
        "seconds": found.seconds,
        "tokens_per_s": found.tokens / found.seconds,
    }
    known = {
        key: each if each is not None and isfinite(each) else None for key, each in values.items()
    }
    return {"file": name, **known}


def bits_per_byte(loss: float, text: SeparateText, config: Config) -> float | None:
    """Return the loss in bits per byte of the text, or `None` if the size of the text is unknown.

    The result is loss / ln 2 x tokens / bytes (Gao et al. 2020, arXiv:2101.00027, section 3.1).
    It is defined only for models that predict every token.
    """
    from hpc3d.model.families import family_of

    if not text.text_bytes or not family_of(config.model).causal:
        return None
    return loss / log(2) * len(text) / text.text_bytes


_COLUMNS = {  # heading: (key, format of the value)
    "loss": ("loss", "{:.6f}"),
    "perplexity": ("perplexity", "{:,.4f}"),
    "bits/byte": ("bits_per_byte", "{:.6f}"),
    "accuracy": ("accuracy", "{:.2%}"),
    "tokens": ("tokens", "{:,}"),
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
}


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the results as lines of equal length, with "-" for unknown values."""
    cells = [["file", *_COLUMNS]]
    for row in rows:
        values = ((row[key], form) for key, form in _COLUMNS.values())
        shown = ("-" if value is None else form.format(value) for value, form in values)
        cells.append([row["file"], *shown])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
        for name, *others in cells
    ]


def parser() -> Parser:
    """Return the command-line parser."""
    usage = "%(prog)s RUN_DIR|CHECKPOINT|FOLDER --data FILE ... [options] "
    usage += "[--section.key value ...]"
    command = RootParser("evaluate", __doc__, _EXITS, usage=usage)
    add = command.add_argument
    text = "run folder, checkpoint, or folder of a Hugging Face Transformers model"
    add("model", type=Path, metavar="RUN_DIR|CHECKPOINT|FOLDER", help=text)
    text = "text file, folder of *.txt files, or token file to evaluate"
    many: dict[str, Any] = {"nargs": "+", "action": Joined, "required": True}
    add("--data", type=Path, metavar="FILE", help=text, **many)
    text = "maximum number of batches per file, drawn with a fixed seed (default: all)"
    add("--batches", type=positive, metavar="B", help=text)
    add("--json", action="store_true", help="print one JSON object on the last line")
    add("--launch", type=number_of_ranks, metavar="N", help=mpi_launcher.LAUNCH_HELP)
    return command


if __name__ == "__main__":
    sys.exit(main())
