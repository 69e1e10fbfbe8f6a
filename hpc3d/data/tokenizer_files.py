"""Read tokenizers from various file formats, and convert them to Hugging Face's tokenizer.json.

    tokenizer.json, or its folder; tokenizer_config.json in the same folder may set the end token
    vocab.json and merges.txt, or encoder.json and vocab.bpe: the two files of a GPT-2 tokenizer
    NAME.tiktoken: ranks of byte sequences, in the format of tiktoken
    gpt2: the two files of GPT-2's tokenizer in the local cache of tiktoken
    tokens.h5: the tokenizer of a token file
    meta.pkl: the character vocabulary of a nanoGPT model

The files are treated as untrusted input: no pickled code is executed, and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha1, sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc3d.console import small_files
from hpc3d.data.token_file import SUFFIX, TokenFile
from hpc3d.data.tokenizer import END_NAME, ENDS, BpeTokenizer, library, reading

RULES, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SAVE_TOKENIZER = (
    "save the tokenizer to this folder with tokenizer.save_pretrained(FOLDER) in transformers"
)
_PAIRS = ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")
_GPT2_END = "<|endoftext|>"
_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# Maximum number of tokens in a tiktoken file, slightly above the size of GPT-2's vocabulary.
# Larger vocabularies use another pre-tokenization pattern.
_MOST_RANKS = 50_300
_MOST_META = 1 << 24  # maximum size in bytes of a meta.pkl

_Merges = Sequence[tuple[str, ...]]


def tokenizer_from(word: str, end_name: str | None = None) -> BpeTokenizer:
    """Return the tokenizer stored at the path `word`, or GPT-2's tokenizer if `word` is gpt2.

    `end_name` overrides the end-of-document token. Raises a one-line ValueError if there is no
    valid tokenizer at the path, or the tokenizer has no such token.
    """
    path = Path(word)
    remedy = (
        f"set --tokenizer to byte, bpe, gpt2, a token file ({SUFFIX}), a run folder or a {RULES}"
    )
    if path.is_dir():
        remedy = f"{SAVE_TOKENIZER}, or {remedy}"
    library()
    with reading(path, "not a readable tokenizer", remedy):
        text, stored_end = _stored(path)
        found = BpeTokenizer(text, None if end_name else stored_end)
    if not end_name:
        return found
    try:
        return BpeTokenizer(text, end_name)
    except ValueError as error:
        raise ValueError(f"--end {end_name}: {error} {word}; use one of its tokens") from None


def _stored(path: Path) -> tuple[str, str | None]:
    """Return the JSON text of a tokenizer, and the end token that its files name."""
    if path.suffix == SUFFIX:
        with TokenFile(path) as tokens:
            return tokens.json, tokens.end_name
    if str(path) == "gpt2" and not path.exists():
        return _byte_level(*_of_pair(*map(_kept_by_tiktoken, _GPT2_SHA256))), None
    if path.suffix == ".tiktoken":
        return _byte_level(*_of_ranks(path)), None
    if (rules := path / RULES if path.is_dir() else path).is_file() or not path.is_dir():
        return _text(rules), _told_end(rules.parent)
    return _of_folder(path), _told_end(path)


def _told_end(folder: Path) -> str | None:
    return token_in(settings_in(folder), "eos_token")


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's tokenizer_config.json, or {} if there is no such file."""
    return object_in(folder / SETTINGS)


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist.

    Raises ValueError if the file contains anything else.
    """
    try:
        found = json.loads(_text(path)) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


def refuse_cache(folder: Path) -> None:
    """Raise ValueError if `folder` is a Hugging Face cache, which keeps files in snapshots/."""
    for snapshot in sorted(folder.glob("snapshots/*")):
        raise ValueError(f"{folder} is a Hugging Face cache folder; use its snapshot {snapshot}")


def token_in(settings: Mapping[str, Any], key: str) -> str | None:
    """Return a special token from a tokenizer_config.json, where it is a string or an object."""
    found = settings.get(key)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _text(path: Path) -> str:
    return small_files.read(path, small_files.MOST_JSON).decode()


def _of_folder(folder: Path) -> str:
    refuse_cache(folder)
    for names in _PAIRS:
        vocabulary, merges = (folder / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            return _byte_level(*_of_pair(_text(vocabulary), _text(merges)))
    raise ValueError(f"the folder has neither {RULES} nor vocab.json and merges.txt")


def _of_pair(vocabulary: str, merges: str) -> tuple[dict[str, int], _Merges]:
    lines = [line for line in merges.splitlines() if not line.startswith("#version")]
    return json.loads(vocabulary), [tuple(line.split(" ")) for line in lines if line]


def _kept_by_tiktoken(name: str) -> str:
    """Return a GPT-2 file from the tiktoken cache, whose file names are SHA-1 hashes of URLs."""
    key = sha1((_GPT2_URL + name).encode()).hexdigest()
    for folder in _folders_of_tiktoken():
        path = folder / key
        if path.is_file():
            content = small_files.read(path, small_files.MOST_JSON)
            if sha256(content).hexdigest() == _GPT2_SHA256[name]:
                return content.decode()
    raise ValueError(
        f'{name} is not in the tiktoken cache of this machine; download it with python -c "import '
        "tiktoken; tiktoken.get_encoding('gpt2')\""
    )


def _folders_of_tiktoken() -> Iterator[Path]:
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiktoken"
    yield Path(tempfile.gettempdir()) / "data-gym-cache"  # cache folder of older tiktoken versions


def _byte_level(numbers: Mapping[str, int], merges: _Merges) -> str:
    """Return the JSON text of a byte-level BPE tokenizer with GPT-2's pre-tokenizer."""
    numbers = {str(token): int(number) for token, number in dict(numbers).items()}
    for pair in merges:  # the library panics on invalid merges
        if len(pair) != 2 or not {*pair, "".join(pair)} <= numbers.keys():
            raise ValueError(
                f"{' '.join(pair)!r:.60} merges tokens that are not in the vocabulary"
            )
    bpe = library()
    tokenizer = bpe.Tokenizer(bpe.models.BPE(numbers, [*merges]))
    tokenizer.pre_tokenizer = bpe.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = bpe.decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in ENDS if name in numbers])
    return str(tokenizer.to_str())


def _of_ranks(path: Path) -> tuple[dict[str, int], _Merges]:
    """Parse a tiktoken file, whose lines consist of a base64-encoded token and its rank.

    Applying all merges of lower rank to the bytes of a token yields two parts. Merging these two
    parts creates the token.
    """
    lines = _text(path).splitlines()
    ranks = {b64decode(word): int(rank) for word, rank in (line.split() for line in lines if line)}
    if not 256 <= len(ranks) <= _MOST_RANKS:
        raise ValueError(f"{len(ranks)} ranks; only GPT-2's 50256 ranks are supported")
    letters = _letters()

    def spelled(token):
        return "".join(letters[byte] for byte in token)

    merges = [
        tuple(map(spelled, _parts(token, ranks)))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    ]
    numbers = {spelled(token): rank for token, rank in ranks.items()}
    return {_GPT2_END: max(numbers.values()) + 1, **numbers}, merges


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, ranks[token]) for a, b in pairwise(parts)]
        index = pairs.index(min(pairs))
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def _letters() -> dict[int, str]:
    """Return a dict from byte value to the character that represents it in GPT-2's vocabulary.

    Printable characters represent themselves.
    """
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def rules_of_bytes() -> str:
    """Return the tokenizer.json text that is equivalent to ByteTokenizer.

    It has no merges. Id 0 is the end-of-document token, not the NUL byte.
    """
    letters = {letter: byte for byte, letter in _letters().items() if byte}
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return json.dumps({
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": END_NAME, **end, "special": True}],
        "pre_tokenizer": {**cut, "use_regex": False},
        "decoder": {**cut, "use_regex": False},
        "model": {"type": "BPE", "vocab": {END_NAME: 0, **letters}, "merges": []},
    })  # fmt: skip


def characters(numbers: Mapping[str, int]) -> BpeTokenizer:
    """Return a character-level tokenizer; `numbers` maps each supported character to its id."""
    bpe = library()
    tokenizer = bpe.Tokenizer(bpe.models.WordLevel(dict(numbers), ""))
    tokenizer.pre_tokenizer = bpe.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = bpe.decoders.Fuse()
    return BpeTokenizer(tokenizer.to_str())


def meta_tokenizer(path: Path) -> BpeTokenizer | None:
    """Return the tokenizer of nanoGPT's meta.pkl next to a .bin file; `None` if it is missing."""
    meta = path.with_name("meta.pkl")
    if not meta.is_file():
        return None
    library()
    with reading(meta, "not a readable nanoGPT meta.pkl", "set --tokenizer"):
        numbers = dict(_plain_pickle(small_files.read(meta, _MOST_META))["stoi"])
        if sorted(numbers.values()) != [*range(len(numbers))]:
            raise ValueError("the character ids are not consecutive numbers from 0")
        return characters({str(key): int(number) for key, number in numbers.items()})


def _plain_pickle(content: bytes) -> Any:
    """Parse a pickle of dicts, strings and integers without executing any code.

    Raises ValueError if the pickle contains opcodes that these types do not need.
    """
    from pickletools import genops

    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for code, argument, _ in genops(content):
        match code.name:
            case "PROTO" | "FRAME":
                pass
            case "EMPTY_DICT":
                stack.append({})
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2":
                stack.append(argument)
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "SETITEM" | "SETITEMS":
                first = len(stack) - 2 if code.name == "SETITEM" else marks.pop()
                stack[first - 1].update(zip(stack[first::2], stack[first + 1 :: 2], strict=True))
                del stack[first:]
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"only dicts, strings and integers are allowed, not {name}")
