"""Check the GPU backend on the GPU of this machine; see tests/gpu/__init__.py and
docs/gpu-verification.md.

Exit codes: 0 no check failed; 3 a check failed; 2 nothing could be checked, or an invalid option.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.gpu import parent
from tests.gpu.parts import MACHINE_FILE, PARTS

GOOD, NOTHING, FAILED = 0, 2, 3
LEAST = 5  # seconds without which a part is not begun
LISTED = 40  # failures


def main(words=None):
    given = arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start, code = time.monotonic(), None
    chosen = [part for part in PARTS if part.name in (given.only or [p.name for p in PARTS])]
    options = [f"--{name}" for name in ("quick", "fake") if getattr(given, name)]
    results = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for place, part in enumerate(chosen):
                left = given.minutes * 60 - (time.monotonic() - start)
                left -= sum(later.reserved for later in chosen[place + 1 :])
                print(f"{part.name}: {max(0, left):.0f} s left for it", flush=True)
                results.append(made(part, Path(folder), min(part.limit, left), options))
                keep(given, results)
    except (KeyboardInterrupt, SystemExit) as end:
        code = getattr(end, "code", 128 + signal.SIGINT)
        print("\nended before it was through: of the part that ran there is nothing")
    show(results, time.monotonic() - start)
    return code or verdict(results, given.fake)


def keep(given, results):
    """Write the current results after every part, and the machine file beside them."""
    if not given.json:
        return
    found = {"fake": given.fake, "quick": given.quick, "parts": results}
    given.json.write_text(json.dumps(found, indent=1))
    last = results[-1]["cases"].get(MACHINE_FILE, {"facts": {}})["facts"]
    if MACHINE_FILE in last:
        path = given.json.with_name("gpu-machine.toml")
        path.write_text(last[MACHINE_FILE])
        print(f"the rates of this GPU are in {path}: simulate --machine {path}")


def arguments(words):
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=writable, help="write everything there")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[p.name for p in PARTS])
    parser.add_argument("--minutes", type=positive, default=9.0, help="for all parts together")
    parser.add_argument("--quick", action="store_true", help="small sizes, fewer cases")
    parser.add_argument("--fake", action="store_true", help="try the check itself, without a GPU")
    return parser.parse_args(words)


def positive(text):
    """Parse a positive number."""
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def writable(path):
    """Check that a file can be written, before anything runs."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return Path(path)


def made(part, folder, seconds, options):
    if seconds < LEAST:
        skipped = {"skipped": "no time left", "problem": "", "cases": {}, "printed": ""}
        return {"part": part.name, "seconds": 0.0, **skipped}
    return parent.run(part, folder, seconds, options)


def outcomes(result):
    return Counter(case["outcome"] for case in result["cases"].values())


def show(results, seconds):
    """Print the table, the numbers of the benchmark, and failed and skipped cases."""
    print(f"\n{'part':12s} passed failed skipped  seconds  problem")
    for result in results:
        count, problem = outcomes(result), result["problem"] or result["skipped"]
        counts = f"{count['passed']:6d} {count['failed']:6d} {count['skipped']:7d}"
        print(f"{result['part']:12s} {counts} {result['seconds']:8.1f}  {problem}")
    print(f"{seconds:.0f} s in all")
    figures([result for result in results if result["part"] in ("environment", "benchmark")])
    failures = [*reasons(results, "failed")]
    for where, why in failures[:LISTED]:
        print(f"FAILED {where}: {' '.join(why.split())[:200]}")
    if len(failures) > LISTED:
        print(f"and {len(failures) - LISTED} more failures, in the JSON")
    skips = Counter()
    for where, why in reasons(results, "skipped"):
        skips[where.partition(":")[0], why] += 1
    for (part, why), count in skips.items():
        print(f"skipped {part}, {count} cases: {why}")


def figures(results):
    for result in results:
        for name, case in result["cases"].items():
            for key, value in case["facts"].items():
                if isinstance(value, int | float | str) and len(str(value)) < 120:
                    print(f"{name}: {key} = {value}")


def reasons(results, outcome):
    """Return (part: case, reason) of all cases and parts with this outcome."""
    whole = {"failed": "problem", "skipped": "skipped"}[outcome]
    for result in results:
        if result[whole]:
            yield f"{result['part']}: all of it", result[whole]
        for name, case in result["cases"].items():
            if case["outcome"] == outcome:
                yield f"{result['part']}: {name}", case["reason"] + wrong(case)


def wrong(case):
    """Return the first failed check of a case, as a short text."""
    bad = next((check for check in case["checks"] if not check["right"]), None)
    return f" ({bad['what']}: {json.dumps(bad)})" if bad else ""


def verdict(results, fake):
    """Return the exit code, with the line that explains it."""
    on_device = {part.name for part in PARTS if part.device}
    total = sum((outcomes(result) for result in results), Counter())
    seen = [r for r in results if r["part"] in on_device and outcomes(r)["passed"]]
    if total["failed"] or any(result["problem"] for result in results):
        print(f"{total['failed']} cases failed, {total['passed']} passed")
        return FAILED
    if fake or not seen:
        why = "this was a fake device" if fake else "no part ran on a GPU"
        print(f"nothing is verified: {why}")
        return NOTHING
    print(f"all {total['passed']} cases passed, {total['skipped']} skipped")
    return GOOD


if __name__ == "__main__":
    sys.exit(main())
