"""Train a Transformer on a mesh of ranks.

    mpirun -np N python -m hpc3d.train [INPUT.toml] [--section.key value ...] [--resume RUN_DIR]
    python -m hpc3d.train [INPUT.toml] --launch N ...

INPUT.toml is a file, or the name of an input that comes with hpc3d, such as gpt-3d-64. Without it,
the default model is trained on the 3D mesh of N ranks with the least communication. Every key of
the input file is also an option (--train.steps 100). The folder results/<name>-<stamp>/ contains
the configuration, the environment, train.log, the checkpoints, and trace.h5 for
`python -m hpc3d.report`.

--launch N starts the N ranks on this machine with the mpirun of the MPI library that mpi4py
loads. The ranks may outnumber the cores.

With --resume, the run in RUN_DIR continues from its newest complete checkpoint (checkpoint.every),
on the same or any other layout.

--help SECTION or --help SECTION.KEY, such as --help train.decay, explains a section or a key.

With --dry-run, nothing is trained or written. The command prints the layout of the run, and the
memory and the time that it would take on --machine NAME. --ranks N sets the number of ranks.

To stop a run after the current step with all state saved, send SIGTERM, SIGINT, SIGHUP or the
signal of run.signal to a rank, set train.max_minutes, or create a file STOP in the folder of the
run. mpirun forwards USR1. On Ctrl-C, mpirun kills the ranks.

Exit codes: 0 success; 1 a rank failed; 2 invalid input (nothing was started); 3 a check found
wrong data; 4 a loss or gradient is not finite; 5 no progress for run.watchdog_s; 75 stopped early,
continue with --resume.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hpc3d.comm.grid import AXES
from hpc3d.config.argument_types import ranks_taken
from hpc3d.console.command_line import has_option, mistyped_options, positional, taken
from hpc3d.console.sanitize import counted, sanitized
from hpc3d.runtime import environment, launch, mpi_launcher

if TYPE_CHECKING:
    from hpc3d.comm.device_setup import Hardware
    from hpc3d.config.input_file import Config, DataConfig
    from hpc3d.data.batches import Batches
    from hpc3d.data.token_file import Tokens
    from hpc3d.data.validation import ValidationBatches
    from hpc3d.pipeline.program import Program
    from hpc3d.runtime.job import Job
    from hpc3d.training.run_loop import RunningJob, RunPlan

_OPTIONS = "--launch", "--resume", "--dry-run", "--machine", "--ranks", "--help"


def main(argv: Sequence[str] | None = None) -> int:
    words = [*(sys.argv[1:] if argv is None else argv)]
    if {"-h", "--help"} & {*words}:
        return launch.show_help("train", lambda: explain(words))
    return mpi_launcher.run(
        "train",
        words,
        lambda job: train(job, words),
        lambda: _wanted(words),
        lambda ranks: read_command_line(ranks, [*words]),
    )


def _wanted(words: list[str]) -> int:
    """Remove `--launch N` from `words` and return N, or 1 for a dry run, which starts no ranks."""
    ranks = ranks_taken(words, "--launch")
    if "--dry-run" not in words:
        return ranks
    words += ["--ranks", str(ranks)]
    return 1


def train(job: Job, words: list[str]) -> None:
    """Run the command `train` on one rank of the job."""
    if "--dry-run" in words:
        job.from_root(lambda: rehearse(job.size, words))
        return
    from hpc3d.comm.device_setup import hardware
    from hpc3d.runtime.shared_folder import refuse_unshared
    from hpc3d.runtime.stop_request import Stop
    from hpc3d.training.run_loop import trained

    with job.progress(f"{counted(job.size, 'rank')}: loading the text and building the model"):
        plan = job.from_root(lambda: read_command_line(job.size, words))
        ours, homes = hardware(job, plan.config), job.homes()
        refuse_unshared(job, homes, lambda: plan.resumed or Path(plan.config.run.out).absolute())
        text = job.on_root(lambda: take_text(plan))
        tokens, batches, validation = text or (None, None, None)
        program = job.on_root(lambda: checked_program(plan.config))
        lock = job.on_root(lambda: open_folder(plan, tokens))
        plan = job.from_root(lambda: plan)
        grid = plan.config.grid()
        program = job.scatter_from_root(
            lambda: [program.of(grid.coord(rank, "p")) for rank in range(grid.size)]
        )
        stop = Stop(job, plan.folder, plan.config.run.signal, plan.config.train.max_minutes)
        run = _begin(job, plan, ours._replace(homes=homes), program, batches, validation)
    with lock or nullcontext():
        trained(job, plan, run, stop)


def read_command_line(ranks: int | None, words: list[str]) -> RunPlan:
    """Parse the command line; return the settings of the run, including a validated configuration.

    Only rank 0 calls this function. `ranks` is the number of ranks of the job; if it is `None`,
    the mesh determines the number.

    Raises
    ------
    ValueError
        If the command line, the input file or the run to resume is invalid.
    """
    from hpc3d.checkpoints.resume import config_of_run, resolved_on, run_to_resume
    from hpc3d.config import load
    from hpc3d.config.backend_rules import untrainable
    from hpc3d.config.resolve import refuse, resolve, violated
    from hpc3d.runtime.metrics_file import sinks_of
    from hpc3d.training.run_loop import RunPlan

    refuse(mistyped_options(words, _OPTIONS))
    run = run_to_resume(words)
    path = positional(words)
    given = path is not None
    if run:
        config = load.load(path, words) if given else config_of_run(run, words)
        ranks = ranks or config.mesh.grid().size
        chosen = [axis for axis in AXES if given or has_option(words, f"--mesh.{axis}")]
        config = resolved_on(ranks, config, run, chosen)
    else:
        rules = partial(violated, ranks=ranks, default=not given)
        config = resolve(load.load(path, words, rules=rules), ranks, default=not given)
    refuse([*untrainable(config)])
    sinks_of(config.run.metrics_hook, config.run.trackers)
    return RunPlan(config, run)


def take_text(plan: RunPlan) -> tuple[Tokens, Batches, list[ValidationBatches]]:
    """Open the texts of a run on rank 0, and set the configuration keys that depend on the texts.

    Returns
    -------
    tuple
        The tokens of the training text, the training batches, and the evaluation batches of each
        validation text.

    Raises
    ------
    ValueError
        If a text is shorter than one window, or its tokenizer differs from the resumed run's.
    """
    from hpc3d.checkpoints import run_text, run_tokenizer
    from hpc3d.checkpoints.resume import checkpointed_texts
    from hpc3d.config import package_data
    from hpc3d.data.mixture import open_texts
    from hpc3d.data.validation import divided, naming_key, separate_texts
    from hpc3d.training.masking import batches_of, validations_of

    run = plan.resumed
    config = run_text.located(plan.config, run, checkpointed_texts(run) if run else None)
    data = config.data
    paths = [package_data.text_path(path) for path in data.paths()]
    with run_tokenizer.advise_tokenizer(run):
        tokens = open_texts(paths, data.ratio(), None if run else data.tokenizer)
    if run:
        with naming_key(run_text.named_text(config)):
            run_tokenizer.refuse_another(run, tokens, config.model)
    plan.config = config = _with_vocabulary(config, tokens, run)
    paths = [package_data.text_path(path) for path in config.data.validation_texts()]
    with run_tokenizer.advise_tokenizer(run):
        separate = separate_texts(paths, tokens, config.data.document_end())
    trained, held = divided(tokens, config.data.validation)
    batches, validation = batches_of(config, trained), validations_of(config, separate or held)
    plan.texts = run_text.described(tokens, separate)
    plan.notes = [*run_text.tokenized_by(tokens), *run_text.trained_on(tokens, separate, config)]
    if config.data.validation and not config.train.eval_every:
        plan.notes.append("data.validation is not evaluated, because train.eval_every = 0")
    return tokens, batches, validation


def _with_vocabulary(config: Config, tokens: Tokens, run: Path | None = None) -> Config:
    """Return `config` with the keys that the tokenizer of the tokenized text determines.

    The keys are `model.vocabulary`, `data.tokenizer` and `data.separator`. `run` is the folder of
    a resumed run.

    Raises
    ------
    ValueError
        If the tokenizer has more tokens than `model.vocabulary`, or if it or a text lacks the
        end-of-document token.
    """
    from hpc3d.config.resolve import refuse
    from hpc3d.config.size_rules import wrong_tokens
    from hpc3d.model.families import least_vocabulary

    least = least_vocabulary(config.model, tokens.vocabulary, tokens.mask())
    vocabulary = config.model.vocabulary or least
    if vocabulary < least:
        masked = " and needs a mask token" if least > tokens.vocabulary else ""
        raise ValueError(
            f"model.vocabulary = {vocabulary}: the tokenizer has {tokens.vocabulary} tokens"
            f"{masked}; set it to "
            f"at least {least}, such as --model.vocabulary {least}"
        )
    model = replace(config.model, vocabulary=vocabulary)
    refuse([*wrong_tokens(model, tokens.mask())])
    data = replace(config.data, tokenizer=tokens.tokenizer)
    data = data.with_separator(tokens.end(), vocabulary)
    _refuse_without_ends(data, tokens, run)
    return replace(config, model=model, data=data)


def _refuse_without_ends(data: DataConfig, tokens: Tokens, run: Path | None) -> None:
    """Raise ValueError if `data` needs end-of-document tokens, but a text has none."""
    from hpc3d.checkpoints.run_tokenizer import kept_tokenizer
    from hpc3d.data.documents import refuse_other_end

    if not data.boundaries and data.shuffle != "documents":
        return
    key = "data.boundaries = true" if data.boundaries else "data.shuffle = documents"
    if data.separator in (None, tokens.end()):
        for path, text in zip(data.paths(), tokens.parts(), strict=True):
            if text.documents == 0:
                raise ValueError(
                    f"{key}: {path} contains no end-of-document token; use a file with "
                    "end-of-document tokens, or remove the key"
                )
    else:
        kept = kept_tokenizer(run) if run else None
        for text in tokens.parts():
            refuse_other_end(text, data.separator, kept.end if kept else None)


def checked_program(config: Config, this_machine: bool = True) -> Program:
    """Return the training program of all pipeline stages. Only rank 0 calls this function.

    Raises
    ------
    ValueError
        If `this_machine` is true and this machine has too little memory for the ranks that run on
        it, or if the layout is wrong.
    """
    from hpc3d.pipeline.program import program_of
    from hpc3d.predict.proof.layout_proof import prove
    from hpc3d.training.footprint import refuse_what_cannot_fit

    if this_machine:
        refuse_what_cannot_fit(config, environment.number_in(environment.LOCAL_RANKS, default=1))
    assert config.model.vocabulary  # set with the text
    prove(config, config.model.vocabulary)
    return program_of(config)


def open_folder(plan: RunPlan, tokens: Tokens) -> TextIO:
    """Create the folder of a run on rank 0, or reopen the folder of a resumed run.

    Returns the lock file of the folder. The lock is held until this file is closed.

    Raises
    ------
    ValueError
        If the folder cannot be written to, or the run cannot be resumed.
    """
    from hpc3d.checkpoints import run_text, run_tokenizer
    from hpc3d.config import load
    from hpc3d.training import run_folder

    with ExitStack() as refused:
        if plan.resumed:
            lock = refused.enter_context(run_folder.claim(plan.resumed))
            _complete(plan)
            plan.folder = run_folder.reopen(plan.resumed, load.to_toml(plan.config))
        else:
            _complete(plan)
            plan.folder = run_folder.create(plan.config, load.to_toml(plan.config))
            lock = refused.enter_context(run_folder.claim(plan.folder))
        run_tokenizer.keep(plan.folder, tokens)
        plan.texts = run_text.recorded(plan.texts, plan.config, plan.folder)
        plan.git = run_folder.git_revision()
        refused.pop_all()  # keep the lock file open
    return lock


def _complete(plan: RunPlan, machine: str | None = None) -> None:
    """Complete the configuration of a run on rank 0.

    For a new run, the number of decay steps is filled in. The configuration of a resumed run is
    compared with the run's newest checkpoint. The model of the named `machine` chooses the size of
    gradient buckets; the default is the local machine.
    """
    from hpc3d.checkpoints.resume import continued, with_decay_steps
    from hpc3d.predict.bucket_size import with_bucket_size_of_run

    if plan.resumed:
        plan.config, plan.changes = continued(plan.resumed, plan.config, texts=plan.texts)
    else:
        plan.config = with_decay_steps(plan.config)
    plan.config = with_bucket_size_of_run(plan.config, machine)


def _begin(
    job: Job,
    plan: RunPlan,
    hardware: Hardware,
    program: Program,
    batches: Batches | None,
    validation: list[ValidationBatches] | None,
) -> RunningJob:
    """Build the mesh, the model and the optimizer of this rank, and restore a resumed run."""
    from hpc3d.checkpoints.saver import saver_of
    from hpc3d.comm.cartesian import build
    from hpc3d.training.evaluator import Evaluator
    from hpc3d.training.graphed_step import settled
    from hpc3d.training.log import layout_lines
    from hpc3d.training.run_loop import RunningJob, equipped
    from hpc3d.training.trainer import Trainer

    config = plan.config
    mesh = build(config.sizes(), transport=hardware.transport, device=hardware.device)
    if hardware.device:
        from hpc3d.cuda.gpu import use

        job.exit_hooks.append(hardware.device.close)
        hardware = hardware.with_line(use(mesh.pool, config.train.tf32))
    layout = layout_lines(config, hardware.transport)
    mesh, watchdog, log, clock = equipped(job, plan, mesh, hardware, layout)
    config = settled(config, hardware.transport)
    trainer = Trainer(mesh, config, config.model.vocabulary, batches, program, clock)
    texts = max(1, len(config.data.validation_texts()))
    evaluator = Evaluator(trainer, validation, texts=texts) if config.train.eval_every else None
    for line in plan.notes:
        log.say(line)
    start = 0
    if plan.resumed:
        from hpc3d.checkpoints.resume import resume

        start = resume(job, plan.folder, trainer, log.say, evaluator=evaluator, texts=plan.texts)
    saver = saver_of(job, plan, trainer, batches, log, evaluator)
    return RunningJob(trainer, saver, watchdog, log, batches, start, evaluator)


def explain(words: list[str]) -> None:
    """Print the help text with all keys, or the help texts of the named keys. Runs on rank 0."""
    from hpc3d.config.reference import about, manual, page_width

    width = page_width()
    named = [word.removeprefix("--") for word in words if word not in ("-h", "--help")]
    if words[0] in ("-h", "--help") and named:
        print("\n\n".join(about(name, width) for name in named), flush=True)
        return
    print(f"{__doc__}\nKeys of an input file, with their defaults:\n")
    print(manual(width=width), flush=True)


def rehearse(ranks: int, words: list[str]) -> None:
    """Describe the run without starting it (--dry-run). Runs on rank 0.

    Raises
    ------
    ValueError
        If the run could not be started.
    """
    from hpc3d.predict.dry_run import dry_run

    words = [word for word in words if word != "--dry-run"]
    asked_for, machine = ranks_taken(words, "--ranks"), taken(words, "--machine")
    plan = read_command_line(asked_for or (ranks if ranks > 1 else None), words)
    _, batches, _ = take_text(plan)
    checked_program(plan.config, this_machine=machine is None)
    _complete(plan, machine)
    lines = [*dry_run(plan.config, machine, batches.epochs(plan.config.train.steps)), *plan.notes]
    lines += [f"resume: {line}" for line in plan.changes]
    where = plan.resumed or f"a new folder {plan.config.run.out}/{plan.config.name}-DATE"
    lines += [f"dry run: nothing was written; the run folder would be {where}"]
    print("\n".join(map(sanitized, lines)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
