"""Report the accuracy of predicted vTrain step times, and the quality of selected layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.vtrain import COLUMNS, EVERY, MEASURED, Steps, calibrate, read

if TYPE_CHECKING:
    from hpc3d.studies.vtrain import ProfileFactors

_MODEL = ["ranks", "hidden", "heads", "sequence", "layers", "batch"]
_LAYOUT = ["t", "d", "p", "micro"]
_SHORT = ["ranks", "hidden", "layers", "batch"]
_CLOSE = 0.03  # layouts with at most this slowdown count as close to the best layout


class Choice(NamedTuple):
    """Layouts of a model with the shortest predicted and the shortest published step time.

    `chosen` is the row with the shortest predicted step time, and `best` the row with the shortest
    published step time. `among` is the number of layouts compared. `loss` is the relative excess
    of the published step time of `chosen` over that of `best`.
    """

    chosen: int
    best: int
    among: int
    loss: float


def choices(rows: np.ndarray, seconds: np.ndarray) -> Iterator[Choice]:
    """Yield a `Choice` for each combination of model, number of ranks and batch size.

    `seconds` contains the predicted step times of `rows`.
    """
    models, model = np.unique(rows[_MODEL], return_inverse=True)
    for number in range(len(models)):
        here = np.flatnonzero(model == number)
        chosen, best = here[seconds[here].argmin()], here[rows["ms"][here].argmin()]
        loss = rows["ms"][chosen] / rows["ms"][best] - 1
        yield Choice(int(chosen), int(best), len(here), float(loss))


def bends(rows: np.ndarray) -> float:
    """Return the maximum second difference, in ms, of step times with respect to the layer count.

    Second differences are computed over series of rows in which only the number of layers changes,
    in equal increments. Only rows with d = 1 are used, because the time of gradient reductions is
    not linear in the number of layers.
    """
    alone = rows[rows["d"] == 1]
    alone = alone[np.argsort(alone["layers"], kind="stable")]
    others = [name for name in COLUMNS if name != "layers"]
    keys, series = np.unique(alone[others], return_inverse=True)
    lines = (alone["ms"][series == number] for number in range(len(keys)))
    return max((abs(np.diff(line, 2)).max() for line in lines if len(line) > 2), default=0.0)


def _spread(errors: np.ndarray) -> dict[str, float]:
    size = abs(errors)
    values = size.mean(), np.median(size), np.quantile(size, 0.9), size.max()
    return dict(zip(("mean", "median", "p90", "max"), map(float, values), strict=True))


def report(composed: Path | str, measured: Path | str, machine: Path | str) -> dict[str, Any]:
    """Print and return the accuracy of the predictions.

    The machine model is calibrated on a tenth of the rows in the file `composed`. Its predictions
    are validated on the remaining rows, and on all rows in the file `measured`.
    """
    rows, base = read(composed), load(machine)
    held = np.arange(len(rows)) % EVERY > 0
    print(
        f"{composed}: {len(rows)} rows; calibration on every {EVERY}th row, validation on the rest"
    )
    print(f"maximum second difference of step time over layers: {bends(rows):.6f} ms")
    steps, found = Steps(rows), {"rows": len(rows), "calibrate": int((~held).sum())}
    for label, profiles in (("with a factor a profile", True), ("the machine alone", False)):
        calibration = calibrate(rows[::EVERY], base, profiles)
        print(f"\n{label}")
        found[label] = {"values": values(calibration)}
        found[label] |= _outcome(rows, steps.seconds(calibration), held, ["ranks", "hidden"])
        if profiles:
            _factors(calibration)
    rows = read(measured)
    print(
        f"\n{measured}: {len(rows)} rows, predicted with the last calibration (no profile factors)"
    )
    seconds = Steps(rows, MEASURED).seconds(calibration)
    everything = np.ones(len(rows), bool)
    return found | {"measured": _outcome(rows, seconds, everything, ["hidden", "t", "p"])}


def _outcome(
    rows: np.ndarray, seconds: np.ndarray, held: np.ndarray, names: Sequence[str]
) -> dict[str, Any]:
    result = {"errors": errors(rows, seconds, held, names), "choices": _chosen(rows, seconds)}
    worst(rows, seconds, held)
    return result


def values(calibration: ProfileFactors) -> dict[str, float]:
    """Print and return the fitted parameters of the machine model."""
    machine = calibration.machine
    found = {
        "launch_us": machine.launch_s * 1e6,
        "attention_GB_per_s": machine.kernels["attend"] / 1e9,
        "odd": calibration.odd,
    }
    print("    " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    return found


def errors(
    rows: np.ndarray, seconds: np.ndarray, held: np.ndarray, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Print and return the prediction errors for the held-out rows `held`.

    Statistics are computed over all held-out rows, and for each value of the columns `names`.
    """
    error = seconds * 1e3 / rows["ms"] - 1
    groups = {"all": held}
    for name in names:
        groups |= {f"{name} {size}": held & (rows[name] == size) for size in np.unique(rows[name])}
    print("    error          rows     mean   median  90th %  maximum")
    found = {label: _spread(error[group]) for label, group in groups.items() if group.any()}
    for label, sizes in found.items():
        columns = "".join(f"{value:9.2%}" for value in sizes.values())
        print(f"    {label:12s} {groups[label].sum():6d}{columns}")
    return found


def _chosen(rows: np.ndarray, seconds: np.ndarray) -> dict[str, Any]:
    found = [*choices(rows, seconds)]
    losses = np.array([choice.loss for choice in found])
    close = int((losses <= _CLOSE).sum())
    print(
        f"    the chosen layout is within {_CLOSE:.0%} of the best one for {close} of "
        f"{len(found)} models"
    )
    print(
        f"    slowdown relative to the best layout: mean {losses.mean():.2%}, maximum "
        f"{losses.max():.2%}"
    )
    for choice in sorted(found, key=lambda choice: -choice.loss)[:5]:
        names = (_layout(rows[row], _LAYOUT) for row in (choice.chosen, choice.best))
        text = " chosen, best ".join(names) if choice.loss else f"{next(names)} chosen, the best"
        best = _layout(rows[choice.best], _SHORT)
        print(f"    {choice.loss:7.2%}  {best}: {text} of {choice.among}")
    return {"models": len(found), "close": close, "worst": float(losses.max())}


def _factors(calibration: ProfileFactors) -> None:
    """For each profile, print the fitted factor that scales the kernel times of the layers."""
    print("    factors: hidden, t; microbatch")
    table = {}
    for profile, factor in calibration.factors.items():
        table.setdefault((profile.hidden, profile.t), {})[profile.micro] = factor
    micros = sorted({micro for row in table.values() for micro in row})
    print("              " + "".join(f"{micro:7d}" for micro in micros))
    for (hidden, t), row in sorted(table.items()):
        cells = (f"{row[micro]:7.2f}" if micro in row else "      -" for micro in micros)
        print(f"    {hidden:7d} {t:2d}{''.join(cells)}")


def worst(rows: np.ndarray, seconds: np.ndarray, held: np.ndarray) -> None:
    """Print the ten rows with the largest absolute prediction errors."""
    error = np.where(held, seconds * 1e3 / rows["ms"] - 1, 0)
    print("    worst rows")
    for row in np.argsort(-abs(error))[:10]:
        name = _layout(rows[row], [*_SHORT, *_LAYOUT])
        times = f"{rows['ms'][row]:.1f} ms, predicted {seconds[row] * 1e3:.1f}"
        print(f"    {error[row]:+7.2%}  {name}: {times}")


def _layout(row: np.void, names: Sequence[str]) -> str:
    return " ".join(f"{name}={row[name]}" for name in names)
