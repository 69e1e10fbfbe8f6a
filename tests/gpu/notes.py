"""Results of a part of the check, written to a file immediately.

Each line of the file is one JSON event: start of a case, number, comparison, or end of a case. If
the process dies, no result is lost, and the file names the case that was running.
"""

import json
import time
import traceback

import numpy as np

SHOWN = 300  # characters of a figure or a reason on the terminal


class Skip(Exception):
    """Raised, with a reason, by a case that cannot run here."""


class Notes:
    """Events of one process; `case` is the current case."""

    def __init__(self, path):
        self.path = path
        self.file = path.open("a", encoding="utf-8", buffering=1)
        self.case, self.wrong = None, 0

    def write(self, event, **values):
        line = json.dumps({"event": event, "case": self.case, **values}, default=plain)
        self.file.write(f"{line}\n")

    def begin(self, case):
        self.case, self.wrong = case, 0
        self.write("begin", at=time.time())

    def end(self, outcome, seconds, reason="", trace=""):
        self.write("end", outcome=outcome, seconds=seconds, reason=reason, traceback=trace)
        if outcome != "passed" or seconds > 0.5:
            text = f"  {outcome:7s} {self.case} ({seconds:.1f} s) {reason}"
            print(text[:SHOWN], flush=True)

    def fact(self, key, value):
        """Record a number or a text without a verdict."""
        self.write("fact", key=key, value=value)
        print(f"    {self.case}: {key} = {' '.join(str(value).split())}"[:SHOWN], flush=True)

    def check(self, what, right, **details):
        """Record a check, passed or failed; the case continues."""
        self.write("check", what=what, right=bool(right), **details)
        if not right:
            self.wrong += 1
            print(f"    WRONG {self.case}: {what}: {details}"[:SHOWN], flush=True)

    def same(self, what, got, expected, rtol, atol=0.0):
        """Check |got - expected| <= atol + rtol |expected| elementwise; atol may be an array."""
        self.check(what, **compared(got, expected, rtol, atol))

    def near(self, what, got, expected, bound):
        """Check |got - expected| <= bound |expected| for the arrays as vectors."""
        found = compared(got, expected, bound, 0.0)
        found["right"] = found["norm_error"] <= bound and not found["not_finite"]
        self.check(what, **found)

    def run(self, case, function):
        """Run a case, and record any exception."""
        self.begin(case)
        start, trace = time.perf_counter(), ""
        try:
            function(self)
            outcome, reason = "passed", ""
            if self.wrong:
                outcome, reason = "failed", f"{self.wrong} checks are wrong"
        except Skip as skip:
            outcome, reason = "skipped", str(skip)
        except (Exception, SystemExit) as error:
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
        self.end(outcome, time.perf_counter() - start, reason, trace)


def plain(value):
    """Convert objects unknown to JSON: NumPy numbers, and all others to text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)


def compared(got, expected, rtol, atol):
    """Return how two arrays differ, and the first place where the difference exceeds the bound."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        return {"right": False, "shape": got.shape, "expected_shape": expected.shape}
    given, wanted = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(given - wanted)
        error[(given == wanted) | (np.isnan(given) & np.isnan(wanted))] = 0
        wrong = ~(error <= atol + rtol * np.abs(wanted))
        norm = np.sqrt(np.square(wanted[np.isfinite(wanted)]).sum())
        found = {
            "right": not wrong.any(),
            "shape": got.shape,
            "max_error": error.max(initial=0.0),
            "norm_error": np.sqrt(np.square(error).sum()) / (norm or 1.0),
            "bound": {"rtol": rtol, "atol": np.max(atol)},
            "not_finite": int((~np.isfinite(given) & np.isfinite(wanted)).sum()),
        }
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(np.nan_to_num(error)), got.shape))
        found |= {
            "wrong": int(wrong.sum()),
            "first": {"at": place, "got": given[place], "expected": wanted[place]},
            "worst": {"at": worst, "got": given[worst], "expected": wanted[worst]},
        }
    return found
