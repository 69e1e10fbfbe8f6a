"""Inspect and verify checkpoints, and exchange weights with Hugging Face transformers.

    python -m hpc3d.checkpoint show   RUN_DIR|CHECKPOINT
    python -m hpc3d.checkpoint verify RUN_DIR|CHECKPOINT
    python -m hpc3d.checkpoint export RUN_DIR|CHECKPOINT -o FOLDER|FILE.safetensors
    python -m hpc3d.checkpoint import FOLDER|FILE.safetensors -o RUN_DIR [--section.key value ...]

A CHECKPOINT is a folder such as step-00000010 of a run, written by any layout. For a RUN_DIR,
`export` uses the newest complete checkpoint. Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Container, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.console.command_line import TOP_KEYS, Parser, complain, run, split_options
from hpc3d.console.exit_codes import CHECK_FAILED
from hpc3d.console.sanitize import counted, sanitized

if TYPE_CHECKING:
    from hpc3d.checkpoints.hf_import import Pretrained
    from hpc3d.config.input_file import Config

_DTYPES = "float32", "bfloat16", "float16"
_EXITS = (
    "exit codes: 0 success, 2 invalid input, 3 verify found damage (explained on standard error)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 for invalid input, or 3 for a damaged checkpoint."""
    words, settings = split_options(sys.argv[1:] if argv is None else argv, TOP_KEYS)
    options = parser().parse_args(words)
    return run("checkpoint", lambda: _act(options, settings))


def _act(options: Namespace, settings: Sequence[str]) -> int:
    if settings and options.work is not _begin:
        raise ValueError(f"{settings[0]}: only import accepts configuration keys; see --help")
    found = options.work(options, settings)
    if options.json:
        print(json.dumps(found))
    return 0 if found.get("whole", True) else CHECK_FAILED


def parser() -> Parser:
    """Return the command-line parser, with one subparser per subcommand."""
    command = Parser("checkpoint", __doc__, _EXITS)
    verbs = command.add_subparsers(
        required=True,
        metavar="show|verify|export|import",
        parser_class=lambda prog, **how: Parser(prog.removeprefix("python -m hpc3d."), **how),
    )

    def verb(name, work, text, source="RUN_DIR|CHECKPOINT", output=None, **how):
        one = verbs.add_parser(name, help=text, description=text, epilog=_EXITS, **how)
        one.set_defaults(work=work)
        add = one.add_argument
        add("source", type=Path, metavar=source, help="input path")
        if output:
            add("-o", "--output", required=True, type=Path, metavar=output, help="output path")
        add("--json", action="store_true", help="print one JSON object on the last line")
        return one

    verb("show", show, "print the step, the layout, the tensors and the size of checkpoints")
    verb("verify", verify, "verify checksums, and check tensors for gaps and overlaps")
    files = "FOLDER|FILE.safetensors"
    text = (
        "export the parameters as a Hugging Face Transformers model: a folder with config.json, "
        "model.safetensors and the tokenizer of the run, or a single safetensors file. A float16 "
        "or bfloat16 run exports its float32 master weights. docs/hugging-face.md lists the "
        "supported model families"
    )
    out = verb("export", export, text, output=files)
    out.add_argument("--force", action="store_true", help="replace an existing export")
    out.add_argument("--dtype", choices=_DTYPES, help="type of the weights (default: unchanged)")
    text = (
        "create a run from a Hugging Face Transformers model. docs/hugging-face.md lists the "
        "supported model families. `train --resume RUN_DIR` then trains it on any layout. "
        "Configuration keys, such as --data.path, can be set as options, as in train"
    )
    usage = f"%(prog)s {files} -o RUN_DIR [--section.key value ...] [--allow-nonfinite] [--json]"
    begin = verb("import", _begin, text, source=files, output="RUN_DIR", usage=usage)
    text = "allow weights that are NaN or infinite"
    begin.add_argument("--allow-nonfinite", action="store_true", help=text)
    return command


def show(options: Namespace, _: Sequence[str]) -> dict[str, Any]:
    """Print one line per checkpoint of a run, or the table of tensors of a single checkpoint."""
    from hpc3d.checkpoints.inspect import about, best_of, checkpoints, latest
    from hpc3d.checkpoints.sharded import Checkpoint, steps_of

    folders = checkpoints(options.source)
    newest = latest(folders[0].parent)
    best = best_of(steps_of(folders[0].parent))
    if folders == [options.source]:
        found = [about(Checkpoint(options.source))]
        print(sanitized(_line_of(found[0], newest, best)))
        _print_tensors(found[0])
    else:
        found = []
        for folder in folders:
            try:
                found.append(about(Checkpoint(folder)))
            except ValueError as problem:
                found.append({"folder": str(folder), "problem": str(problem)})
        for one in found:
            print(sanitized(_line_of(one, newest, best)))
    return {"latest": newest, "best": best, "checkpoints": found}


def _line_of(found: Mapping[str, Any], newest: str, best: str) -> str:
    """Format a checkpoint as one line: its name, date, layout and size, or why it is unusable."""
    name = Path(found["folder"]).name
    if "problem" in found:
        return f"{name}  incomplete or damaged: {found['problem']}"
    how = found["parallel"]
    mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items()) or "serial"
    schedule = how["schedule"] or "none"
    layout = f"{mesh}, {how['split'] or how['scheme']}, {schedule}, ZeRO {how['zero']}"
    active = f" ({found['active']:,} active)" if found["active"] else ""
    size = f"{found['parameters']:,} parameters{active}, {found['bytes'] / 1e6:,.1f} MB"
    mark = "  latest" * (name == newest)
    if name == best:
        mark += f"  best, validation loss {found['best']['loss']:.4f}"
    files = counted(found["files"], "file")
    return f"{name}  {found['written_utc']}  {layout}; {size} in {files}{mark}"


def _print_tensors(found: Mapping[str, Any]) -> None:
    """Print a table of the tensors in a checkpoint.

    Tensors whose names differ only in the layer number share a row.
    """

    def row(tensor):
        name = re.sub(r"^layers\.\d+\.", "layers.*.", tensor["name"])
        return name, tensor["shape"], tensor["dtype"], tensor["kinds"]

    rows = {}
    for tensor in found["tensors"]:
        rows.setdefault(row(tensor), []).append(tensor["bytes"])
    print("  count  tensor                     shape             dtype    bytes           kinds")
    for (name, shape, dtype, kinds), sizes in rows.items():
        shape = " x ".join(map(str, shape))
        total = f"{sum(sizes):,}"
        print(f"  {len(sizes):5}  {name:25}  {shape:16}  {dtype:7}  {total:14}  {' '.join(kinds)}")


def verify(options: Namespace, _: Sequence[str]) -> dict[str, Any]:
    """Verify all data in the checkpoints.

    In the returned dict, `whole` is True if all checkpoints are intact.
    """
    from hpc3d.checkpoints.inspect import checkpoints, problems

    found = []
    for folder in checkpoints(options.source):
        wrong = problems(folder)
        found.append({"folder": str(folder), "problems": wrong})
        complain("checkpoint", wrong)
        if not wrong:
            print(sanitized(f"{folder} is complete"))
    return {"whole": not any(one["problems"] for one in found), "checkpoints": found}


def export(options: Namespace, _: Sequence[str]) -> dict[str, Any]:
    """Export the weights of a checkpoint, or of the newest complete checkpoint of a run."""
    from hpc3d.checkpoints import hf_export, run_tokenizer
    from hpc3d.checkpoints.inspect import checkpoints, newest_whole

    if not options.force:
        hf_export.refuse_to_replace(options.output)
    opened, wrong = newest_whole(checkpoints(options.source))
    complain("checkpoint", wrong)
    special = run_tokenizer.special_ids(opened.folder)
    earlier = hf_export.earlier_files(options.output)
    arrays = hf_export.export(opened, options.output, special, options.dtype)
    alone = options.output.suffix == ".safetensors"
    module = "module" in opened.header
    files = [] if alone else run_tokenizer.export(opened.folder, options.output)
    written = {hf_export.WEIGHTS, *([] if module else [hf_export.CONFIG]), *files}
    for path in earlier:
        if path.name not in written:  # left over from an earlier export
            path.unlink()
    count = sum(array.size for array in arrays.values())
    dtypes = sorted({array.dtype.name for array in arrays.values()})
    of_type = f"{len(arrays)} tensors of type {' and '.join(dtypes)}"
    print(sanitized(f"{opened.folder}: {count:,} parameters in {of_type}"))
    for line in hf_export.notes(opened):
        print(sanitized(line))
    if not (alone or run_tokenizer.RULES in files or module):
        print(sanitized("no tokenizer was exported, because the run has none"))
    print(sanitized(f"written to {options.output}"))
    return {
        "output": str(options.output),
        "checkpoint": str(opened.folder),
        "step": opened.header["step"],
        "parameters": count,
        "dtypes": dtypes,
        "tensors": {name: [*array.shape] for name, array in arrays.items()},
    }


def _begin(options: Namespace, settings: Sequence[str]) -> dict[str, Any]:
    """Create a run from the weights of a Hugging Face Transformers model."""
    from hpc3d.checkpoints import new_run
    from hpc3d.checkpoints.hf_import import Pretrained, configured
    from hpc3d.checkpoints.run_text import located, named_text, open_training_text
    from hpc3d.checkpoints.run_tokenizer import (
        advise_tokenizer,
        keep,
        refuse_another,
        refuse_unfit,
        take_along,
    )
    from hpc3d.data.validation import naming_key

    pretrained = Pretrained(options.source, options.allow_nonfinite)
    config = located(configured(pretrained, settings))
    given = {word.partition("=")[0] for word in settings}
    with advise_tokenizer(options.source), open_training_text(config) as tokens:
        refuse_unfit(options.source, config.model.vocabulary)
        if "--data.path" in given:
            with naming_key(named_text(config)):
                refuse_another(options.source, tokens, config.model)
        shapes = new_run.begin(options.output, config, pretrained.parameter)
        known = take_along(options.source, options.output)
        if "--data.path" in given:
            keep(options.output, tokens)
    count, tensors = sum(map(prod, shapes.values())), len(pretrained.locations)
    print(sanitized(f"{options.source}: {count:,} parameters in {tensors} tensors"))
    for line in _notes(pretrained, config, given):
        print(sanitized(line))
    for line in _next_commands(options.output, config, given, known):
        print(sanitized(line))
    return {"run": str(options.output), "parameters": count, "tensors": tensors}


def _notes(pretrained: Pretrained, config: Config, given: Container[str]) -> Iterator[str]:
    """Yield a line for a shortened context, and one for the dropout of an imported model."""
    if config.model.sequence < pretrained.model["sequence"]:
        positions = f"model.sequence = {config.model.sequence}"
        yield f"{positions}, of the {pretrained.model['sequence']} positions of this model"
    if config.model.dropout and "--model.dropout" not in given:
        dropouts = pretrained.family.settings.dropouts
        keys = ", ".join(key for key in dropouts if key in pretrained.settings)
        yield (
            f"model.dropout = {config.model.dropout}, from {keys}: training applies it to the "
            "embeddings, the attention probabilities, and the outputs of attention and MLP"
        )


def _next_commands(run: Path, config: Config, given: Container[str], known: bool) -> Iterator[str]:
    """Yield the commands that train an imported model; `known` is true if it has a tokenizer."""
    from hpc3d.data.tokenizer import ByteTokenizer

    of_bytes = not known and config.model.vocabulary == ByteTokenizer.vocabulary
    prepare = "python -m hpc3d.prepare TEXT -o tokens.h5 --tokenizer"
    if known and "--data.path" not in given:
        yield f"tokenize texts with its tokenizer: {prepare} {run}"
    elif not of_bytes and "--data.path" not in given:
        yield (
            "the model has no tokenizer; tokenize texts with the one it was trained with: "
            f"{prepare} FILE, or use the tokens of nanoGPT: python -m hpc3d.prepare train.bin "
            "-o tokens.h5"
        )
    yield f"written to {run}; continue with"
    text = f" --data.path {'TEXT' if of_bytes else 'tokens.h5'}"
    further = {"--checkpoint.every": " --checkpoint.every 100", "--data.path": text}
    how = "".join(words for key, words in further.items() if key not in given)
    yield f"python -m hpc3d.train --launch N --resume {run}{how}"


if __name__ == "__main__":
    sys.exit(main())
