"""The commands of a page as one bash script."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.mpi import JOB_LOCK, ROOT, surroundings

# `newest PREFIX` is the run that a page calls results/PREFIX-...; `ended CODE WANTED COMMAND`
# follows each command.
HEAD = """\
set -m
hpc3d() { python -m hpc3d "$@"; }
newest() { ls -td results/"$1"*/ | head -1; }
ended() {
    echo "== $SECONDS s: $3"
    [ "$1" -eq "$2" ] || { echo "exit code $1: $3" >&2; exit 1; }
}
"""
SOME_RUN = re.compile(r"results/([\w-]*?-)?\.\.\.")
KEYWORD = re.compile(r"for |done$")


def script(commands):
    """Return the text of a script that ends at the first of `commands`, pairs (text, exit code),
    with another exit code."""
    lines = [HEAD]
    for text, code in commands:
        lines.append(SOME_RUN.sub(lambda found: f'"$(newest {found[1] or ""})"', text))
        if not KEYWORD.match(text):
            lines.append(f"ended $? {code} {shlex.quote(text)}")
    return "\n".join(lines) + "\n"


def reduced(text, words):
    """Append words to a command, before a final `&`; words that begin with -np replace the number
    of ranks of -np or --launch."""
    ranks = re.match(r"-np (\d+)", words)
    if ranks:
        text = re.sub(r"(-np|--launch) \d+", rf"\1 {ranks[1]}", text)
        words = words[ranks.end() :].strip()
    command, last = re.fullmatch(r"(.*?)((?: &)?)", text).groups()
    return f"{command} {words}{last}"


def output_of(text, folder, seconds):
    """Return the output of a script that succeeded in `folder`; raise AssertionError otherwise."""
    with JOB_LOCK:
        process = _begun(text, folder)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            out, err = process.communicate()
            raise AssertionError(f"not through after {seconds} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def _begun(text, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {**os.environ, **surroundings(), "PATH": path, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how = {"cwd": folder, "env": settings, "text": True, "start_new_session": True}
    return subprocess.Popen(["bash", "-c", text], stdin=subprocess.DEVNULL, **pipes, **how)


def _end(session):
    """Kill all processes of a session, because shell jobs have their own process groups."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        subprocess.run(["pkill", f"-{number}", "-s", str(session)], check=False)
