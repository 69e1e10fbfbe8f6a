"""Train a Transformer on a mesh of ranks.

    mpirun -np N python -m hpc3d.train [INPUT.toml] [--section.key value ...] [--resume RUN_DIR]

INPUT is a file, or the name of one that comes with hpc3d, such as gpt-3d-64; without it the
default model is trained on the best cuboid of N ranks.  Any value of the input file can be
given as an option (--train.steps 100).  With --resume the run in RUN_DIR goes on from its newest
whole checkpoint (checkpoint.every), on the same or any other layout.  The run is kept in
results/<name>-<stamp>/: configuration, environment, train.log, checkpoints and trace.h5, which
`python -m hpc3d.report` reads.

--help SECTION and --help SECTION.KEY, as --help train.decay, tell of some keys alone.

With --dry-run nothing is trained and nothing written: it says what would run, what memory and what
time on --machine NAME it would take; --ranks N stands for mpirun.

SIGTERM, SIGINT and SIGHUP to a rank, the signal of run.signal, train.max_minutes and a file STOP
in that folder stop the run after the current step, with everything saved. mpirun forwards USR1;
at Ctrl-C it kills the ranks.

Exit codes: 0 done; 2 bad input (one line each, nothing started); 75 stopped early, go on with
--resume; 3 something computed is wrong; 4 a loss or gradient is not finite; 5 nothing moved for
run.watchdog_s; 1 a rank failed (the job ends).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from hpc3d.plain import counted, plain
from hpc3d.runtime import environment, launch

if TYPE_CHECKING:
    from hpc3d.comm.transport import Hardware
    from hpc3d.config.input_file import Config
    from hpc3d.data.batches import Batches
    from hpc3d.data.token_file import Tokens
    from hpc3d.data.validation import ValidationBatches
    from hpc3d.pipeline.program import Program
    from hpc3d.runtime.job import Job
    from hpc3d.training.run_loop import RunningJob, RunPlan


class Asked(NamedTuple):
    """What the command line and the input file ask for, and the folder of the run to go on with,
    if there is one."""

    config: Config
    run: Path | None


class Opened(NamedTuple):
    """What rank 0 has opened for a run: its plan, the data, the program of all stages, the lock of
    its folder, which is held as long as this lives, and what the model is evaluated on."""

    plan: RunPlan
    batches: Batches
    program: Program
    lock: TextIO
    validation: ValidationBatches | None


class RunText(NamedTuple):
    """What a run reads: to train, and to evaluate the model if it is to; its tokens, and those of
    a validation text of its own."""

    batches: Batches | None
    validation: ValidationBatches | None
    tokens: Tokens | None = None
    held: Tokens | None = None


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return launch.run("train", lambda job: train(job, list(words)))


def train(job: Job, words: list[str]) -> None:
    """The whole run on one rank."""
    if {"-h", "--help"} & set(words):
        job.from_root(lambda: explain(words))
        return
    from hpc3d.comm.transport import hardware
    from hpc3d.runtime.host_map import homes_of
    from hpc3d.runtime.shared_folder import refuse_unshared

    if "--dry-run" in words:
        job.from_root(lambda: rehearse(job.size, words))
        return
    with job.patience(f"{counted(job.size, 'rank')}: loading the text and making the model"):
        config, resumed = job.from_root(lambda: asked(job.size, words))
        ours, homes = hardware(job, config), homes_of(job.gather(job.place()))
        refuse_unshared(job, homes, lambda: resumed or Path(config.run.out).absolute())
        opened = job.on_root(lambda: prepare(config, resumed))
        plan = job.from_root(lambda: opened.plan)
        program = job.scatter_from_root(lambda: _programs(plan.config, opened.program))
        from hpc3d.runtime.stop_request import Stop
        from hpc3d.training.run_loop import trained

        config = plan.config
        stop = Stop(job, plan.folder, config.run.signal, config.train.max_minutes)
        text = RunText(opened.batches, opened.validation) if opened else RunText(None, None)
        run = _begin(job, plan, program, text, ours._replace(homes=homes))
    with opened.lock if opened else nullcontext():
        trained(job, plan, run, stop)


def _begin(
    job: Job, plan: RunPlan, program: Program, text: RunText, hardware: Hardware
) -> RunningJob:
    """The RunningJob of this rank: mesh, model, optimiser, in the state that it goes on from."""
    from hpc3d.checkpoints.saver import saver_of
    from hpc3d.comm.cartesian import build
    from hpc3d.training.evaluator import Evaluator
    from hpc3d.training.log import layout_lines
    from hpc3d.training.run_loop import RunningJob, equipped
    from hpc3d.training.trainer import Trainer

    config = plan.config
    mesh = build(config.mesh.sizes(), transport=hardware.transport, device=hardware.device)
    if hardware.device:
        from hpc3d.cuda.gpu import use

        job.exit_hooks.append(hardware.device.close)
        hardware = hardware.with_line(use(mesh.pool, config.train.tf32))
    mesh, watchdog, log, clock = equipped(job, plan, mesh, hardware, layout_lines(config))
    trainer = Trainer(mesh, config, config.model.vocabulary, text.batches, program, clock)
    evaluator = Evaluator(trainer, text.validation) if config.train.eval_every else None
    for line in plan.notes:
        log.say(line)
    start = 0
    if plan.resumed:
        from hpc3d.checkpoints.resume import resume

        start = resume(job, plan.folder, trainer, log.say, evaluator=evaluator, texts=plan.texts)
    saver = saver_of(job, plan, trainer, text.batches, log, evaluator)
    return RunningJob(trainer, saver, watchdog, log, text.batches, start, evaluator)


def explain(words: list[str]) -> None:
    """Rank 0: what the command does, and every key with its meaning; or keys that are named."""
    from hpc3d.config.reference import about, manual, page_width

    width = page_width()
    named = [word.removeprefix("--") for word in words if word not in ("-h", "--help")]
    if words[0] in ("-h", "--help") and named:
        print("\n\n".join(about(name, width) for name in named), flush=True)
        return
    print(f"{__doc__}\nKeys, with their defaults, as an input file has them:\n")
    print(manual(width=width), flush=True)


def rehearse(ranks: int, words: list[str]) -> None:
    """Rank 0: say what would run; ValueError for what is wrong."""
    from argparse import ArgumentTypeError

    from hpc3d.checkpoints.resume import continued, with_decay_steps
    from hpc3d.checkpoints.run_text import described
    from hpc3d.cli import number_of_ranks
    from hpc3d.predict.dry_run import dry_run, taken

    words = [word for word in words if word != "--dry-run"]
    given, machine = taken(words, "--ranks"), taken(words, "--machine")
    try:
        asked_for = None if given is None else number_of_ranks(given)
    except ArgumentTypeError as error:
        raise ValueError(f"--ranks {given}: {error}") from None
    config, run = asked(asked_for or (ranks if ranks > 1 else None), words)
    config, text, _ = _ready(config, run, this_machine=machine is None)
    changed = []
    if run:
        config, changed = continued(run, config, texts=described(text.tokens, text.held))
    else:
        config = with_decay_steps(config)
    lines = [*dry_run(config, machine, text.batches.windows), *_notes(config, text)]
    lines += [f"resume: {line}" for line in changed]
    where = run or f"a new folder {config.run.out}/{config.name}-DATE"
    lines += [f"dry run: nothing is written; the run would be kept in {where}"]
    print("\n".join(map(plain, lines)), flush=True)


def _notes(config: Config, text: RunText) -> Iterator[str]:
    """Rank 0: a line for a validation text that is not used, or that is trained on."""
    from hpc3d.checkpoints.run_text import trained_on

    yield from trained_on(text.tokens, text.held, config)
    if config.data.validation and not config.train.eval_every:
        yield "nothing is evaluated on data.validation: train.eval_every is 0"


def asked(ranks: int | None, words: list[str]) -> Asked:
    """Rank 0: the Asked of the command line and the input file, for so many ranks (None: as many
    as its mesh has); ValueError for what is wrong."""
    from hpc3d.checkpoints.resume import (
        checkpointed_config,
        config_of_run,
        run_to_resume,
        with_free_mesh,
        with_free_schedule,
    )
    from hpc3d.config import load
    from hpc3d.config.backend_rules import untrainable
    from hpc3d.config.rules import refuse, resolve
    from hpc3d.runtime.metrics_file import sinks_of

    run = run_to_resume(words)
    given = words and not words[0].startswith("-")
    path = words.pop(0) if given else None
    config = config_of_run(run, words) if run and not given else load.load(path, words)
    ranks = ranks or config.mesh.grid().size
    if run:
        config = with_free_schedule(with_free_mesh(config, ranks), checkpointed_config(run))
    config = resolve(config, ranks, default=not (given or run))
    refuse([*untrainable(config)])
    sinks_of(config.run.metrics_hook, config.run.tensorboard)
    return Asked(config, run)


def prepare(config: Config, run: Path | None) -> Opened:
    """Rank 0: open the text, make the folder or take up that of `run`; ValueError for what is
    wrong."""
    from hpc3d.checkpoints import run_text, run_tokenizer
    from hpc3d.checkpoints.resume import continued, with_decay_steps
    from hpc3d.config import load
    from hpc3d.training import run_folder as folder
    from hpc3d.training.run_loop import RunPlan

    config, text, program = _ready(config, run)
    changed, texts = [], run_text.described(text.tokens, text.held)
    with ExitStack() as refused:
        if run:
            lock = refused.enter_context(folder.claim(run))
            config, changed = continued(run, config, texts=texts)
            where = folder.reopen(run, load.to_toml(config))
        else:
            config = with_decay_steps(config)
            where = folder.create(config, load.to_toml(config))
            lock = refused.enter_context(folder.claim(where))
        run_tokenizer.keep(where, text.tokens)
        texts, notes = run_text.recorded(texts, config, where), [*_notes(config, text)]
        plan = RunPlan(config, where, folder.git_revision(), bool(run), changed, notes, texts)
        refused.pop_all()  # the lock stays open
    return Opened(plan, text.batches, program, lock, text.validation)


def _ready(
    config: Config, run: Path | None, this_machine: bool = True
) -> tuple[Config, RunText, Program]:
    """Rank 0: `config` with what its text settles, what a run of it, or `run` that goes on, reads,
    and what it executes; ValueError for what is wrong, also where ranks on `this_machine` outgrow
    its memory."""
    from hpc3d.pipeline.program import program_of
    from hpc3d.training.footprint import refuse_what_cannot_fit

    config, text = _open_text(config, run)
    if this_machine:
        refuse_what_cannot_fit(config, environment.number_in(environment.LOCAL_RANKS, default=1))
    return config, text, program_of(config)


def _open_text(config: Config, run: Path | None) -> tuple[Config, RunText]:
    """Rank 0: `config` with what its text settles, and the batches of it; ValueError where its
    tokens are not those that `run` was trained on."""
    from hpc3d import shipped
    from hpc3d.checkpoints import run_text, run_tokenizer
    from hpc3d.checkpoints.resume import checkpointed_texts
    from hpc3d.data.token_file import open_tokens

    config = run_text.located(config, run, checkpointed_texts(run) if run else None)
    tokens = open_tokens(shipped.text(config.data.path), None if run else config.data.tokenizer)
    if run:
        run_tokenizer.refuse_another(run, tokens)
    config = _settled(config, tokens, run)
    return config, _text_of(config, tokens)


def _text_of(config: Config, tokens: Tokens) -> RunText:
    """The batches of a run; ValueError where the text does not fill one window of each."""
    from hpc3d import shipped
    from hpc3d.data.validation import divided
    from hpc3d.training.masking import batches_of, validation_of

    held = config.data.validation
    named = held and isinstance(held, str)
    trained, held = divided(tokens, shipped.text(held) if named else held)
    batches = batches_of(config, trained)
    if held is None:
        return RunText(batches, None, tokens)
    return RunText(batches, validation_of(config, held), tokens, held.tokens if named else None)


def _settled(config: Config, tokens: Tokens, run: Path | None) -> Config:
    """`config` with its vocabulary and its tokenizer; ValueError where tokens are too many."""
    from hpc3d.config.rules import refuse
    from hpc3d.config.size_rules import wrong_tokens
    from hpc3d.model.families import family_of, least_vocabulary

    least = tokens.vocabulary
    if family_of(config.model).causal or tokens.mask() is None:
        least = least_vocabulary(config.model, least)
    vocabulary = config.model.vocabulary or least
    if vocabulary < least:
        remedy = f"use at least {least}, or leave the key out"
        if run:
            remedy = f"{run} takes tokens of its own tokenizer alone"
        masked = ", and one stands for those that are masked" if least > tokens.vocabulary else ""
        raise ValueError(
            f"model.vocabulary = {vocabulary}: the tokenizer has {tokens.vocabulary} tokens"
            f"{masked}; {remedy}"
        )
    model = replace(config.model, vocabulary=vocabulary)
    refuse([*wrong_tokens(model)])
    return replace(config, model=model, data=replace(config.data, tokenizer=tokens.tokenizer))


def _programs(config: Config, program: Program) -> list[Program]:
    """Rank 0: what each rank runs, the part of its pipeline stage."""
    grid = config.mesh.grid()
    return [program.of(grid.coord(rank, "p")) for rank in range(grid.size)]


if __name__ == "__main__":
    sys.exit(main())
