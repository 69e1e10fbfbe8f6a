"""Tokenize texts into a token file, or verify one.

python -m hpc3d.prepare TEXT... -o tokens.h5
python -m hpc3d.prepare --verify tokens.h5
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpc3d.checkpoints.run_tokenizer import of_bytes
from hpc3d.config import package_data
from hpc3d.console.command_line import Parser, complain, run
from hpc3d.console.exit_codes import CHECK_FAILED
from hpc3d.console.sanitize import Problems, abbreviated, counted, lines_of, sanitized
from hpc3d.data.sources import BIN, JSONL, PARQUET, training_pieces
from hpc3d.data.token_file import SUFFIX, TokenFile, verify, write_tokens
from hpc3d.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    kind_of,
    refuse_repeated,
    same_rules,
    text_files,
    train_bpe,
)
from hpc3d.data.tokenizer_files import meta_tokenizer, tokenizer_from
from hpc3d.data.validation import naming_key

log = logging.getLogger("hpc3d.prepare")  # here, __name__ is "__main__"

_BPE_VOCABULARY = 8192
_SOURCES = (
    "text, .jsonl or .parquet file, nanoGPT or Megatron-LM .bin file, or folder of *.txt files"
)
_TOKENIZERS = """byte (default); bpe, trained on the texts; a token file (.h5), which contains its
tokenizer; a run folder; a tokenizer.json or its folder;
a folder with GPT-2's vocab.json and merges.txt; ranks.tiktoken; or gpt2, from tiktoken's cache"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 for invalid input, or 3 if the verification fails."""
    arguments = parser().parse_args(argv)
    return run("prepare", lambda: _work(arguments))


def _work(arguments: argparse.Namespace) -> int:
    """Write or verify a token file.

    The prefix `data.path` is removed from error messages, because it is not a key of this command.
    """
    try:
        return _check(arguments) if arguments.verify else prepare(arguments)
    except ValueError as error:
        raise Problems(_without_key(error)) from error


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser(
        "prepare",
        "Tokenize UTF-8 texts into one token file. Set data.path to this file to train on it.",
        "exit codes: 0 success, 2 invalid input (nothing was written), 3 --verify failed",
    )
    add = parser.add_argument
    add("texts", nargs="*", type=Path, metavar="TEXT", help=_SOURCES)
    add("-o", "--output", type=Path, metavar="FILE.h5", help="token file to write")
    text = "JSON lines field or Parquet column that contains the text (default: text)"
    add("--field", "--column", default="text", metavar="NAME", help=text)
    add("--tokenizer", metavar="byte|bpe|gpt2|FILE", help=_TOKENIZERS)
    add("--end", metavar="TOKEN", help="end-of-document token (default: set by the tokenizer)")
    text = "recognize special tokens in the texts, such as the <|im_start|> of a chat"
    add("--special-tokens", action="store_true", help=text)
    text = f"vocabulary size of bpe (default: {_BPE_VOCABULARY}); byte has "
    text += f"{ByteTokenizer.vocabulary} tokens"
    add("--vocabulary", type=int, metavar="N", help=text)
    add("--force", action="store_true", help="replace FILE.h5 if it exists")
    add("--verify", type=Path, metavar="FILE.h5", help="verify the SHA-256 of a token file")
    add("--json", action="store_true", help="print one JSON object on the last line")
    return parser


def prepare(arguments: argparse.Namespace) -> int:
    """Tokenize the texts, write the token file and print a summary."""
    start = time.perf_counter()
    arguments.tokenizer = _byte_or_file(arguments.tokenizer)
    output = _new_file(arguments)
    paths = map(package_data.text_path, arguments.texts)
    texts = [text for path in paths for text in text_files(path, f"a {_SOURCES}")]
    refuse_repeated(texts)
    tokenizer = _make_tokenizer(arguments, texts)
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.special = arguments.special_tokens
    size = sum(text.stat().st_size for text in texts)
    if not size:
        raise ValueError(f"{arguments.texts[0]}: the text is empty; specify another file")
    write_tokens(output, texts, tokenizer, _progress(size), arguments.field)
    notices = [*_assumed_formats(texts), *_ignored(arguments.texts)]
    complain("prepare", [*notices, *_special(tokenizer, arguments)])
    _describe(output, arguments.json, seconds=time.perf_counter() - start)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Verify all data of a token file and print a summary."""
    if arguments.texts or arguments.output:
        raise ValueError("--verify cannot be combined with TEXT or -o; leave them out")
    if not arguments.verify.is_file():
        raise ValueError(f"--verify {arguments.verify}: no such file")
    start = time.perf_counter()
    try:
        verify(arguments.verify)
    except ValueError as error:
        complain("prepare", _without_key(error))
        return CHECK_FAILED
    print(sanitized(f"{arguments.verify}: the SHA-256 of the tokens matches"))
    _describe(arguments.verify, arguments.json, seconds=time.perf_counter() - start)
    return 0


def _new_file(arguments: argparse.Namespace) -> Path:
    """Return the path of the token file to write; raise ValueError if options are invalid."""
    output, end, problems = arguments.output, arguments.end, []
    if not arguments.texts or output is None:
        problems.append("TEXT and -o FILE.h5 are required; see --help")
    elif output.suffix != SUFFIX:
        problems.append(f"-o {output}: the name of a token file must end in {SUFFIX}")
    elif not output.parent.is_dir():
        problems.append(f"-o {output}: the folder {output.parent} does not exist; create it first")
    elif output.exists() and not arguments.force:
        problems.append(
            f"-o {output} already exists; choose another file, or replace it with --force"
        )
    if end and arguments.tokenizer in (None, "byte", "bpe"):
        name = arguments.tokenizer or ByteTokenizer.name
        problems.append(
            f"--end {end}: the end token of the tokenizer {name} is fixed; leave --end out"
        )
    if arguments.special_tokens and arguments.tokenizer in (None, "byte", "bpe"):
        problems.append("--special-tokens needs the tokenizer of a model; set --tokenizer FILE")
    problems += [
        f"{path} is already a token file; specify texts, or train on this file"
        for path in arguments.texts
        if path.suffix == SUFFIX and path.is_file()
    ]
    problems += [
        f"{path} contains the vocabulary of nanoGPT, not text; specify {path.parent / 'train.bin'}"
        for path in arguments.texts
        if path.name == "meta.pkl"
    ]
    if problems:
        raise Problems(problems)
    return output


def _byte_or_file(name: str | None) -> str | None:
    """Return byte if `name` is a run or a token file with the byte tokenizer, otherwise `name`."""
    if name is None or Path(name).suffix != SUFFIX:
        return ByteTokenizer.name if name and of_bytes(Path(name)) else name
    with naming_key("--tokenizer"), TokenFile(Path(name)) as tokens:
        return ByteTokenizer.name if tokens.tokenizer == ByteTokenizer.name else name


def _make_tokenizer(arguments: argparse.Namespace, texts: Sequence[Path]) -> Tokenizer:
    """Return the tokenizer selected by --tokenizer; train it on `texts` if it is bpe."""
    name, numbered = arguments.tokenizer, [text for text in texts if text.suffix in BIN]
    if numbered and name in ("byte", "bpe"):
        raise ValueError(
            f"{numbered[0]}: its token ids are not from the tokenizer {name}; use --tokenizer FILE"
        )
    if name == "bpe":
        return _trained_on(texts, arguments)
    if name not in (None, "byte") or numbered:
        if arguments.vocabulary is not None:
            raise ValueError(
                f"--vocabulary {arguments.vocabulary}: the tokenizer determines the vocabulary "
                "size; omit --vocabulary"
            )
        found = tokenizer_from(name, arguments.end) if name else _of_numbers(numbered[0])
        _refuse_others(numbered, found, name or f"next to {numbered[0]}")
        characters = kind_of(found.name, found.json) == "characters"
        one = characters and len(texts) == 1 and texts[0].suffix not in (*JSONL, *PARQUET)
        if found.end is None and len(numbered) < len(texts) and not one:
            raise ValueError(
                "the tokenizer has no known end-of-document token, which separates documents; "
                "specify it, such as --end '<eos>', or --end $'\\n' for characters"
            )
        return found
    if arguments.vocabulary not in (None, ByteTokenizer.vocabulary):
        raise ValueError(
            f"--vocabulary {arguments.vocabulary}: byte has {ByteTokenizer.vocabulary} tokens; "
            "omit --vocabulary, or use --tokenizer bpe"
        )
    return ByteTokenizer()


def _trained_on(texts: Sequence[Path], arguments: argparse.Namespace) -> BpeTokenizer:
    """Train a tokenizer on `texts`; print a notice if they are too short for --vocabulary."""
    log.info("training a tokenizer on %s", counted(len(texts), "text"))
    given = arguments.vocabulary
    wanted = _BPE_VOCABULARY if given is None else given
    found = train_bpe(training_pieces(texts, arguments.field), wanted)
    if found.vocabulary < wanted:
        sizes = f"{found.vocabulary:,} tokens instead of {wanted:,}"
        complain("prepare", [f"the tokenizer has {sizes}, because the texts are too short"])
    return found


def _of_numbers(path: Path) -> BpeTokenizer:
    """Return the tokenizer that produced the token ids in a .bin file."""
    if tokenizer := meta_tokenizer(path):
        return tokenizer
    raise ValueError(
        f"{path}: the tokenizer of its token ids is unknown; use --tokenizer gpt2, or "
        "--tokenizer tokenizer.json (hf download gpt2 tokenizer.json), or put meta.pkl of nanoGPT "
        "into the same folder"
    )


def _refuse_others(numbered: Sequence[Path], tokenizer: BpeTokenizer, name: str) -> None:
    """Raise ValueError if the meta.pkl next to a .bin file describes a different tokenizer."""
    for path in numbered:
        meta = meta_tokenizer(path)
        if meta and not same_rules(meta.json, tokenizer.json):
            raise ValueError(
                f"{path}: its tokenizer {path.with_name('meta.pkl')} differs from the tokenizer "
                f"{name}; prepare it separately, or remove meta.pkl if it belongs to another file"
            )


def _assumed_formats(texts: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each .bin file whose format no file in the same folder determines."""
    for path in texts:
        index = path.with_suffix(".idx")
        if path.suffix in BIN and not index.exists() and meta_tokenizer(path) is None:
            yield (
                f"{path}: read as uint16 token ids, the format of nanoGPT; for Megatron-LM data, "
                f"put {index.name}, which contains the document ends, into the same folder"
            )


def _ignored(texts: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each folder of texts with .bin files, which are not read."""
    for path in texts:
        for file in sorted(path.glob("*.bin"))[:1]:
            yield f"{path}: only its *.txt files are read; specify {file} to read its token ids"


def _special(tokenizer: Tokenizer, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a line if --special-tokens has no effect, or if it would have one.

    Without --special-tokens, only the first megabyte of the first text is searched.
    """
    if not isinstance(tokenizer, BpeTokenizer) or arguments.tokenizer == "bpe":
        return
    if tokenizer.special and not tokenizer.recognized:
        names = abbreviated(", ".join(tokenizer.special_tokens.values())) or "none"
        found = "no special token was found in the texts"
        yield f"--special-tokens: {found}; the tokenizer has {names}"
    if tokenizer.ordinary:
        names = abbreviated(", ".join(tokenizer.ordinary))
        yield (
            f"the texts contain special tokens as ordinary text ({names}); set --special-tokens "
            "to recognize them"
        )


def _progress(size: int) -> Callable[[int], None]:
    """Return a callback that logs how much of the `size` bytes of text has been processed."""
    done = 0

    def report(piece: int) -> None:
        nonlocal done
        done += piece
        log.info("%.1f of %.1f MB of text", done / 1e6, size / 1e6)

    return report


def _describe(path: Path, as_json: bool, **results: float) -> None:
    with TokenFile(path) as tokens:
        held = {
            "file": str(path),
            "tokens": len(tokens),
            "documents": tokens.documents or None,
            "bytes": tokens.text_bytes,
            "tokenizer": kind_of(tokens.tokenizer, tokens.json),
            "vocabulary": tokens.vocabulary,
            "sha256": tokens.sha256,
        }
    for name, value in (held | results).items():
        print(sanitized(f"{name:12}{_readable(value)}"))
    if as_json:
        print(json.dumps(held | results))


def _readable(value: str | float | None) -> str:
    """Format a count with thousands separators, or a time with two decimals."""
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else f"{value:,.2f}".removesuffix(".00")


def _without_key(error: ValueError) -> list[str]:
    return [line.removeprefix("data.path: ") for line in lines_of(error)]


if __name__ == "__main__":
    sys.exit(main())
