"""Validate a checkpoint manifest, which is untrusted input and has this structure:

{format, version, step, updates, config, ...,
 files: [{file, bytes, sha256, pieces: [[name, kind, dtype, offset, boxes]]}]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpc3d.config.limits import MOST_COUNT
from hpc3d.training.gradient_compression import OWN_STATES
from hpc3d.training.optimizers.catalog import state_kinds

FORMAT, VERSION = "hpc3d-checkpoint", 1
_BFLOAT16 = "bfloat16"  # NumPy has no type code for bfloat16
_CODES = "|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"
# size of an element in bytes; integers and complex numbers are buffers of torch modules
_TYPES = {_BFLOAT16: 2} | {code: np.dtype(code).itemsize for code in _CODES}
_SHARD = re.compile(r"rank-[0-9]{5,9}\.bin")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # tensor name
_KIND = re.compile(r"\.[1-9][0-9]{0,6}\Z")  # number of a worker, at the end of a kind
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 30  # maximum size of a manifest in bytes, enough for about ten million boxes
_MOST = 1 << 62  # upper bound on every integer in a manifest
_MOST_DIMS = 64  # maximum number of dimensions of a tensor


def read_manifest(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the file list of a manifest.

    Raises OSError or ValueError if the manifest is unreadable or invalid.
    """
    path = folder / "manifest.json"
    size = path.stat().st_size
    _require(path.is_file(), "manifest.json is not a regular file")
    _require(size <= _LARGEST, f"manifest.json is too large ({size} bytes)")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("manifest.json is not valid JSON") from None
    _require(isinstance(header, dict), "manifest.json is not a JSON object")
    files = header.pop("files", None)
    _check_header(header)
    _check_files(files)
    return header, files


def name_of(dtype: np.dtype) -> str:
    """Return the name that a manifest uses for a dtype."""
    return _BFLOAT16 if dtype.name == _BFLOAT16 else dtype.str


def type_of(name: str) -> np.dtype:
    """Return the dtype for a type name in a manifest."""
    if name == _BFLOAT16:
        import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
    return np.dtype(name)


def narrowed(
    name: str, values: np.ndarray, dtype: np.dtype, option: str = "--train.dtype"
) -> np.ndarray:
    """Return `values` cast to `dtype`, or unchanged if the cast could not change any value.

    Raises ValueError if a finite value exceeds the range of `dtype` and would become infinite. The
    message names the `option` that sets `dtype`.
    """
    if np.can_cast(values.dtype, dtype):
        return values
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    beyond = np.isinf(found) & np.isfinite(values)
    if beyond.any():
        value = values[beyond][0]
        raise ValueError(
            f"{name}: {value:g} exceeds the range of {dtype.name}; set {option} "
            f"{values.dtype.name}, the type of the stored values"
        )
    return found


def _require(sound: object, problem: str) -> None:
    if not sound:
        raise ValueError(problem)


def _number(value: object, most: int = _MOST) -> bool:
    return type(value) is int and 0 <= value < most


def _check_header(header: Any) -> None:
    version = header.get("version")
    known = header.get("format") == FORMAT and _number(version) and version <= VERSION
    _require(known, "this version of hpc3d does not support the format of manifest.json")
    position = header.get("position") or {}
    _require(isinstance(position, dict), "manifest.json: position must be a JSON object")
    counts = [(key, header.get(key)) for key in ("step", "updates")]
    counts += [(f"position.{key:.20}", count) for key, count in position.items()]
    for key, count in counts:
        known = _number(count, MOST_COUNT)
        _require(known, f"manifest.json: {key} must be an integer >= 0 and < {MOST_COUNT}")
    best = header.get("best")
    _require(best is None or _sound_best(best), "manifest.json: the entry 'best' is invalid")
    texts = header.get("texts") or {}
    _require(isinstance(texts, dict), "manifest.json: texts must be a JSON object")
    for key, text in texts.items():
        _require(_sound_text(text), f"manifest.json: the entry texts.{key!s:.20} is invalid")
    module = header.get("module")
    _require(
        module is None or _sound_module(module), "manifest.json: the entry 'module' is invalid"
    )


def _sound_best(best: Any) -> bool:
    sound = isinstance(best, dict) and {*best} == {"step", "loss"}
    return sound and _number(best["step"], MOST_COUNT) and type(best["loss"]) is float


def _sound_text(text: Any) -> bool:
    if not isinstance(text, dict) or {*text} != {"path", "from_run", "sha256", "tokens"}:
        return False
    return _number(text["tokens"]) and all(
        isinstance(text[key], str) for key in ("path", "from_run", "sha256")
    )


def _sound_module(module: Any) -> bool:
    if not isinstance(module, dict) or {*module} != {"shapes", "frozen", "aliases"}:
        return False
    shapes, frozen, aliases = (module[key] for key in ("shapes", "frozen", "aliases"))
    if not (isinstance(shapes, dict) and isinstance(frozen, list) and isinstance(aliases, dict)):
        return False
    names = [*frozen, *aliases.values()]
    return all(isinstance(name, str) and name in shapes for name in names) and all(
        isinstance(shape, list) and len(shape) <= _MOST_DIMS and all(map(_number, shape))
        for shape in shapes.values()
    )


def _check_files(files: Any) -> None:
    _require(isinstance(files, list), "manifest.json: files must be a list")
    _require(
        all(isinstance(file, dict) for file in files),
        "manifest.json: each entry of files must be a JSON object",
    )
    names = set()
    for file in files:
        name = file.get("file")
        sound = isinstance(name, str) and _SHARD.fullmatch(name)
        _require(sound, f"{name!r:.60} is not a valid file name")
        _require(name not in names, f"{name} is listed twice")
        names.add(name)
        _check_file(file)


def _check_file(file: Any) -> None:
    """Raise ValueError if the entry of a file is invalid.

    The entry must have a valid size and hash, and its pieces must not extend beyond the end of the
    file.
    """
    name, digest, pieces = file["file"], file.get("sha256"), file.get("pieces")
    _require(_number(file.get("bytes")), f"manifest.json: {name} has no valid size in bytes")
    _require(isinstance(digest, str) and _DIGEST.fullmatch(digest), f"{name} has no valid SHA-256")
    _require(isinstance(pieces, list), f"manifest.json: {name} has no list of pieces")
    kinds = {"value", *state_kinds(), *OWN_STATES}
    for piece in pieces:
        sound = isinstance(piece, list) and len(piece) == 5 and _sound_piece(*piece, kinds)
        _require(sound, f"manifest.json: {name} has an invalid piece")
        *_, dtype, offset, boxes = piece
        end = offset + _TYPES[dtype] * sum(map(_elements, boxes))
        _require(end <= file["bytes"], f"manifest.json: a piece exceeds the size of {name}")


def _sound_piece(
    name: object,
    kind: object,
    dtype: object,
    offset: object,
    boxes: Any,
    kinds: Collection[str],
) -> bool:
    return (
        isinstance(name, str)
        and _NAME.fullmatch(name)
        and isinstance(kind, str)
        and _KIND.sub("", kind) in kinds
        and isinstance(dtype, str)
        and dtype in _TYPES
        and _number(offset)
        and isinstance(boxes, list)
        and all(map(_sound_box, boxes))
    )


def _sound_box(edges: Any) -> bool:
    """Return True if a list contains the edges of a valid box (see `BlockSlices.edges`).

    The edges are [top, bottom, left, right] for a matrix, followed by [front, back], the range of
    experts, for stacked experts.
    """
    if not (isinstance(edges, list) and len(edges) in (4, 6) and all(map(_number, edges))):
        return False
    return all(first <= last for first, last in zip(edges[::2], edges[1::2], strict=True))


def _elements(edges: Sequence[int]) -> int:
    return prod(last - first for first, last in zip(edges[::2], edges[1::2], strict=True))
