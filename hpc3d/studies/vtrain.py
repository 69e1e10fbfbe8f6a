"""Predict vTrain's published GPT-2 step times with a machine model fitted to a tenth of them.

J. Bang et al., "vTrain", MICRO 2024, arXiv:2312.12391; the data are in inputs/published. Each row
is a training step in float16 on A100 GPUs with tensor (scheme 1d), data and pipeline parallelism
(1F1B). The steps ran on 2 to 8 GPUs of one node or on 64 to 512 GPUs of several nodes.

The multi-node rows are measured. The single-node rows are also published as measurements, but
vTrain computed them from measured all-reduce times and from kernel times of a layer, the embedding
and the head, profiled on an A100 once for each `Profile`. This is evident because, for otherwise
identical configurations, the step time is linear in the number of layers to the nanosecond, unlike
any measurement (hpc3d.studies.vtrain_report.bends).
"""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.console.sanitize import reason_of
from hpc3d.model.spec import ModelSizes
from hpc3d.model.stage import FIRST, LAST, LAYER
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, timeline
from hpc3d.predict.machine.machine import Machine
from hpc3d.runtime.optional_packages import need
from hpc3d.studies.machine_queries import PartWork, work_of
from hpc3d.tensor.split import SCHEMES

COLUMNS = ["ranks", "batch", "micro", "hidden", "heads", "layers", "sequence", "t", "d", "p"]
ROW = np.dtype([*((name, int) for name in COLUMNS), ("ms", float)])
_DIVISORS = {"batch": ["d", "micro"], "layers": ["p"], "heads": ["t"], "hidden": ["heads"]}
_FIELDS = range(-len(ROW), 0)  # indices of the file's last columns, which hold the fields of ROW
EVERY = 10  # every 10th published row is used for calibration
_VOCABULARY = 50257
PARTS = {"embedding": FIRST, "block": LAYER, "head": LAST}
_ATTENTION = ("attend", "attend_again", "attend_grad")
_VALUE = 2  # bytes of a float16 value
# Bytes per parameter that an update accesses: the float16 value and Adam's two float32 moments are
# read and written, and the float16 gradient is read.
_UPDATE = 2 * (_VALUE + 4 + 4) + _VALUE
# Assumed relative standard deviations: _NOISE of the measured step times around the fitted model,
# and SPREAD of the profiles' correction factors around 1 (Gaussian prior).
_NOISE, SPREAD = 0.02, 0.1
# Free parameters of the fit, each with initial value, lower bound and upper bound.
FREE = {
    "launch_s": (20e-6, 1e-6, 1e-3),
    "attention": (5e11, 1e10, 2.039e12),
    "odd": (2.0, 1.0, 10.0),
}


def read(path: Path | str) -> np.ndarray:
    """Read training steps from vTrain's .csv or .csv.gz file; return an array of dtype ROW.

    Raises ValueError, with the row number and a fix, if a row is not a valid training step.
    """
    try:
        # Treat NumPy's warning about an empty file as an error.
        with warnings.catch_warnings(action="error", category=UserWarning):
            how = {
                "comments": None,
                "delimiter": ",",
                "skiprows": 1,
                "usecols": _FIELDS,
                "ndmin": 1,
            }
            Path(path).stat()  # unlike loadtxt, stat reports the operating system's error
            rows = np.loadtxt(path, ROW, **how)
    except OSError as error:
        raise ValueError(f"{path}: {reason_of(error)}; use a CSV file of training steps") from None
    except (ValueError, EOFError, zlib.error, UserWarning) as error:
        columns = ", ".join(ROW.names)
        raise ValueError(f"{path}: {error}; the columns are {columns}") from None
    if len(rows) < 2 * EVERY:
        raise ValueError(f"{path}: only {len(rows)} rows; provide at least {2 * EVERY}")
    for number, row in enumerate(rows, 1):
        if wrong := _impossible({name: row[name].item() for name in ROW.names}):
            raise ValueError(f"{path}: row {number}: {wrong}; correct or remove it")
    return rows


def _impossible(row: Mapping[str, float]) -> str | None:
    """Return an error message if a row is not a valid training step, otherwise `None`."""
    for name, value in row.items():
        if not 0 < value < inf:
            return f"{name} = {value}: must be positive"
    if row["ranks"] != row["t"] * row["d"] * row["p"]:
        return f"ranks = {row['ranks']}: must equal t d p = {row['t']} x {row['d']} x {row['p']}"
    for whole, parts in _DIVISORS.items():
        if row[whole] % prod(row[part] for part in parts):
            return f"{whole} = {row[whole]}: must be divisible by {' x '.join(parts)}"
    return None


class Published(NamedTuple):
    """Properties shared by all training steps in a file.

    `recompute` is the value of parallel.recompute. If `pad` is positive, the vocabulary is padded
    so that the shard of each rank is a multiple of `pad`, as in Megatron-LM. If `pad` is 0, the
    vocabulary is rounded down to a multiple of the number of ranks, as in vTrain.
    """

    recompute: str
    pad: int

    def vocabulary(self, t: int) -> int:
        """Return the padded or truncated vocabulary size for t tensor-parallel ranks."""
        return (
            -(-_VOCABULARY // (self.pad * t)) * self.pad * t if self.pad else _VOCABULARY // t * t
        )


# The single-node rows are modeled without recomputation. With recomputation, their times would
# require more than the peak FLOP/s of an A100.
COMPOSED = Published(recompute="none", pad=0)
MEASURED = Published(recompute="full", pad=128)


class Profile(NamedTuple):
    """Model and layout sizes that determine which kernels a rank executes."""

    hidden: int
    heads: int
    sequence: int
    t: int
    micro: int

    def work(self, published: Published) -> dict[str, PartWork]:
        """Record the operations of the embedding, a block and the head on one rank.

        Dropout is not modeled explicitly, because its cost is included in the fitted values.
        """
        vocabulary = published.vocabulary(self.t)
        model = ModelSizes(1, self.hidden, self.heads, self.sequence, vocabulary)
        return {
            name: work_of(
                model,
                SCHEMES["1d"],
                sizes={"p": 1, "x": self.t},
                sequences=self.micro,
                dtype=np.dtype(np.float16),
                part=part,
                recompute=published.recompute,
            )
            for name, part in PARTS.items()
        }


class ProfileFactors(NamedTuple):
    """Fitted machine model with correction factors.

    `odd` is the slowdown of matrix products with an odd dimension. `factors` maps a `Profile` (the
    sizes that determine a rank's kernels) to a correction factor for the predicted kernel times
    of the layers; the default factor is 1.
    """

    machine: Machine
    odd: float
    factors: dict

    def seconds(self, asked: Counter) -> list[float]:
        """Return the predicted [computation time, communication time] of a pass in seconds.

        `asked` maps each operation of the pass to the number of times that it is executed. An
        operation is a pair (method, arguments). Matrix products with odd dimensions are slower,
        because tensor cores require rows aligned to 16 bytes (NVIDIA, "Matrix Multiplication
        Background User's Guide").
        """
        spent = [0.0, 0.0]
        for (method, arguments), count in asked.items():
            odd = method == "product" and any(s > 1 and s % 2 for s in arguments[:3])
            seconds = self.answer(method, arguments)
            spent[method == "call"] += count * seconds * (self.odd if odd else 1)
        return spent

    def answer(self, method: str, arguments: tuple) -> float:
        """Return the predicted time of an operation recorded by a `Tally`, in seconds."""
        match method, arguments:
            case "product", (m, n, k, dtype, batch):
                return self.machine.product(m, n, k, dtype, batch)
            case "kernel", (name, nbytes):
                return self.machine.kernel(name, nbytes)
            case "call", (op, nbytes, members):
                return self.machine.call(op, nbytes, members)


class Steps:
    """Training steps in an array of dtype ROW, and the operations that their ranks execute.

    Ranks are numbered along the tensor axis t first, then along the data axis d, and last along
    the pipeline axis p.
    """

    def __init__(self, rows: np.ndarray, published: Published = COMPOSED) -> None:
        self.rows, self.micros = rows, rows["batch"] // (rows["d"] * rows["micro"])
        keys, self.profile = np.unique(rows[[*Profile._fields]], return_inverse=True)
        self.profiles = [Profile(*map(int, key)) for key in keys]
        self.work = [profile.work(published) for profile in self.profiles]

    def seconds(self, calibration: ProfileFactors) -> np.ndarray:
        """Return the predicted time of each step in seconds, shape [steps]."""
        factors = [calibration.factors.get(profile, 1.0) for profile in self.profiles]
        return self.total(self.passes(calibration), np.array(factors)[self.profile], calibration)

    def split(self, calibration: ProfileFactors) -> tuple[np.ndarray, np.ndarray]:
        """Split each predicted step time into the kernel time of the layers and the rest.

        Returns (rest, kernel time) in seconds, each of shape [steps]. The split is exact, because
        the predicted step time is linear in the kernel times: all stages are identical except for
        the last stage, which contains the head and is the slowest.
        """
        passes = self.passes(calibration)
        fixed = self.total(passes, 0.0, calibration)
        return fixed, self.total(passes, 1.0, calibration) - fixed

    def passes(self, calibration: ProfileFactors) -> dict[str, np.ndarray]:
        """Return the forward and backward times of the embedding, a block and the head in s.

        The result is a dict from name to an array with the dimensions [computation or
        communication, forward or backward, step].
        """
        found = {}
        for name in PARTS:
            both = [(work[name].forward, work[name].backward) for work in self.work]
            spent = [[calibration.seconds(asked) for asked in passes] for passes in both]
            found[name] = np.array(spent)[self.profile].transpose(2, 1, 0)
        return found

    def total(self, passes: Any, factors: Any, calibration: ProfileFactors) -> np.ndarray:
        """Return the step times in seconds, with layer computation times scaled by `factors`."""
        computation, calls = passes["block"]
        layers = (computation * factors + calls) * self.rows["layers"] / self.rows["p"]
        first, last = sum(passes["embedding"]), sum(passes["head"])
        seconds = self._each_row(self._end_of_step, calibration.machine)
        message = self._each_row(self.message, calibration.machine)
        sizes = zip(self.rows["p"].tolist(), self.micros.tolist(), strict=True)
        for p, m in sorted({*sizes}):
            at = (self.rows["p"] == p) & (self.micros == m)
            stages = np.repeat(layers[None, :, at], p, axis=0)
            stages[0] += first[:, at]
            stages[-1] += last[:, at]
            seconds[at] += one_f_one_b(stages, m, message[at])
        return seconds

    def _each_row(self, function: Callable[..., float], machine: Machine) -> np.ndarray:
        rows = zip(self.rows, self.profile.tolist(), strict=True)
        return np.array([function(row, self.work[profile], machine) for row, profile in rows])

    def message(self, row: np.void, work: Mapping[str, PartWork], machine: Machine) -> float:
        """Return the time to send an activation or its gradient to the adjacent stage, in s."""
        nbytes = _VALUE * float(row["micro"] * row["sequence"] * row["hidden"])
        there = int(row["t"] * row["d"])
        return machine.call("send", nbytes, (0, there)) if row["p"] > 1 else 0.0

    def _end_of_step(self, row: np.void, work: Mapping[str, PartWork], machine: Machine) -> float:
        """Return the time of the gradient all-reduce and the Adam update in seconds.

        The time is computed for the first stage, which has the most parameters.
        """
        t, d = int(row["t"]), int(row["d"])
        layers = int(row["layers"] // row["p"])
        held = work["embedding"].parameters + work["block"].parameters * layers
        received = 2 * (1 - 1 / d) * _VALUE * held
        summed = machine.call("all_reduce", received, range(0, d * t, t))
        return summed + machine.kernel("adamw", _UPDATE * held)


def one_f_one_b(passes: Any, micros: int, message: np.ndarray) -> np.ndarray:
    """Return the times of many 1F1B steps with the same number of microbatches, shape [step].

    `passes` has the shape [stage, forward or backward, step], and `message` has the shape [step].
    All times are in seconds.
    """
    schedule, placement = instruction_streams("1f1b", len(passes), micros)
    rows = timeline(schedule, placement, Cost(1, 1, 1))
    order = sorted((row[0], stage, row[2]) for stage in range(len(rows)) for row in rows[stage])
    clock, ends = [np.zeros_like(message)] * len(passes), {}
    for _, stage, instruction in order:
        start = clock[stage]
        for input in placement.needs(stage, instruction):
            start = np.maximum(start, ends[input] + (message if input[0] != stage else 0))
        clock[stage] = start + passes[stage, int(instruction.op != "F")]
        ends[stage, instruction._replace(op=instruction.op[0])] = clock[stage]
    return np.max(clock, axis=0)


def calibrate(rows: np.ndarray, base: Machine, profiles: bool = True) -> ProfileFactors:
    """Fit a machine model to the step times in `rows`.

    The fit starts from the published properties in `base`. The free parameters are listed in FREE;
    if `profiles` is true, each profile also has a factor. The fit minimizes the squared errors of
    the logarithms of the step times, with a Gaussian prior of width SPREAD on the factors.
    """
    need("calibration from published rows", "scipy")
    from scipy.optimize import least_squares

    steps, measured = Steps(rows), rows["ms"] / 1e3
    doubt = (_NOISE / SPREAD) ** 2 if profiles else inf

    def residuals(logarithms):
        fixed, layers = steps.split(ProfileFactors(*with_values(base, np.exp(logarithms)), {}))
        change = _changes(steps.profile, fixed, layers, measured, doubt)
        predicted = fixed + layers * (1 + change[steps.profile])
        return np.concatenate([np.log(predicted / measured), change * _NOISE / SPREAD])

    start, *bounds = np.log([*FREE.values()]).T
    values = np.exp(least_squares(residuals, start, bounds=bounds, diff_step=1e-4).x)
    machine, odd = with_values(base, values)
    fixed, layers = steps.split(ProfileFactors(machine, odd, {}))
    change = _changes(steps.profile, fixed, layers, measured, doubt)
    return ProfileFactors(
        machine, odd, dict(zip(steps.profiles, (1 + change).tolist(), strict=True))
    )


def _changes(
    profile: np.ndarray, fixed: np.ndarray, layers: np.ndarray, measured: np.ndarray, doubt: float
) -> np.ndarray:
    """For each profile, fit the relative change in layer kernel times by ridge regression."""
    share, missing = layers / measured, 1 - (fixed + layers) / measured
    return np.bincount(profile, share * missing) / (np.bincount(profile, share**2) + doubt)


def with_values(base: Machine, values: Iterable[float]) -> tuple[Machine, float]:
    """Return a machine with the given FREE parameters, and the value of `odd`."""
    launch, attention, odd = map(float, values)
    kernels = base.kernels | dict.fromkeys(_ATTENTION, attention)
    return replace(base, launch_s=launch, kernels=kernels), odd
