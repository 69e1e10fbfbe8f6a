"""Runs a part in child processes: a process that hangs is killed, and after a process has died, a
new one runs the remaining cases."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.child import DEVICE_LOST

ROOT = Path(__file__).parents[2]
POLL = 0.1  # seconds between two looks at a process
STARTS = 8  # of a part, at most
KEPT = 20_000  # characters of what a process printed
BETWEEN = "before the first or between two cases"


class Watched:
    """Process that writes events to one file, and prints to another one, which is shown live.

    `case` is the current case, `since` its start, and `ended` is True after its end.
    """

    def __init__(self, command, events, log, environment):
        self.events, self.log, self.case, self.since = events, log, None, time.monotonic()
        self.seen, self.shown = events.stat().st_size, log.stat().st_size
        with log.open("a") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self):
        """Show new output, and follow the cases; return the exit code of an ended process."""
        code = self.process.poll()
        with self.log.open(errors="replace") as file:
            file.seek(self.shown)
            print(file.read(), end="", flush=True)
            self.shown = file.tell()
        with self.events.open("rb") as file:
            file.seek(self.seen)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.seen += len(whole)
        for line in whole.splitlines():
            self.follow(json.loads(line))
        return code

    def follow(self, event):
        if event["event"] == "begin":
            self.case, self.since = event["case"], time.monotonic()
        elif event["event"] == "end":
            self.case, self.since = None, time.monotonic()

    def kill(self):
        """Kill the process and all its children."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                break
            time.sleep(0.5)
        self.process.wait()


def run(part, folder, seconds, options=(), command=(sys.executable, "-m", "tests.gpu.child")):
    """Run the cases of a part within `seconds`; return the cases with their results, and the
    errors of its processes."""
    events, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    events.touch()
    log.touch()
    start, problem = time.monotonic(), ""
    for _ in range(STARTS):
        left = seconds - (time.monotonic() - start)
        if left <= 0:
            break
        words = [*command, part.name, str(events), *options]
        watched = Watched(words, events, log, environment())
        try:
            code, running = watch(watched, part, left)
        except BaseException:  # told to end: nothing may go on with the device
            watched.kill()
            raise
        if running is not None:
            write_end(events, *running)
        elif code != DEVICE_LOST:
            problem = f"its process ended with {code}" if code else ""
            break
    else:
        problem = f"given up after {STARTS} processes"
    return read(part, events, log, problem, time.monotonic() - start)


def watch(watched, part, seconds):
    """Wait for a process. Return its exit code, or None if it was killed, and the case that was
    running, with its outcome and the reason. A timeout of the whole part is not a failure."""
    deadline = time.monotonic() + seconds
    while True:
        code = watched.look()
        if code is not None:
            died = code and code != DEVICE_LOST and watched.case
            why = f"the process ended with {code}"
            return code, (watched.case, "failed", why) if died else None
        now, spent = time.monotonic(), time.monotonic() - watched.since
        if now > deadline or spent > part.case_limit:
            outcome = "failed" if spent > part.case_limit else "skipped"
            watched.kill()
            watched.look()
            return None, (watched.case or BETWEEN, outcome, f"ended after {spent:.0f} s")
        time.sleep(POLL)


def write_end(events, case, outcome, reason):
    """Record the end of a case whose process could not."""
    how = {"outcome": outcome, "seconds": 0.0, "reason": reason, "traceback": ""}
    with events.open("a") as file:
        for event in ({"event": "begin"}, {"event": "end", **how}):
            file.write(f"{json.dumps({**event, 'case': case})}\n")
    print(f"  {outcome:7s} {case}: {reason}", flush=True)


def environment():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **settings}


def read(part, events, log, problem, seconds):
    """Read all results of a part."""
    result = {"part": part.name, "seconds": seconds, "skipped": "", "problem": problem}
    cases = {}
    for event in map(json.loads, events.read_text(encoding="utf-8").splitlines()):
        kind, case = event.pop("event"), event.pop("case")
        if kind == "skipped":
            result["skipped"] = event["reason"]
            continue
        if kind == "cases":
            cases |= {name: fresh() for name in event["names"] if name not in cases}
            continue
        found = cases.setdefault(case, fresh())
        if kind == "fact":
            found["facts"][event["key"]] = event["value"]
        elif kind == "check":
            found["checks"].append(event)
        elif kind == "end":
            found |= event
    bad = problem or any(case["outcome"] == "failed" for case in cases.values())
    text = log.read_text(errors="replace") if bad else ""
    return {**result, "cases": cases, "printed": text[-KEPT:]}


def fresh():
    """Return the entry of a case that has not run yet."""
    rest = {"reason": "no time left", "traceback": "", "seconds": 0.0}
    return {"outcome": "skipped", "facts": {}, "checks": [], **rest}
