"""Monitor a run from another terminal: loss, speed, remaining time and wait times of ranks.

python -m hpc3d.watch results/RUN
python -m hpc3d.watch                  # the newest run in results/
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.config.argument_types import real
from hpc3d.console.command_line import Parser, run
from hpc3d.console.sanitize import Controls
from hpc3d.runtime import colors

if TYPE_CHECKING:
    from hpc3d.analyze.live import LiveRun

_TEXT = """\
Show the progress of a run until Ctrl-C: step, remaining time, loss, tokens/s, memory, evaluations,
and, for each mesh axis, the fractions of the step time spent in calls and waiting for other ranks.

The command only reads files, so it runs on any machine that can access the run folder, for example
in an ssh session. The activities within a step are read from the latest trace segments, which are
at most half a minute old. If the run has ended, its final state is shown once. If the output is
not a terminal, one line is printed per finished step."""

# Escape sequences that move the cursor to the top left, and erase the rest of the line or screen.
_TOP, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_STYLES = {"ended": "green", "stopped": "yellow", "failed": "red"}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    return run("watch", lambda: _watch(options), patient=False)


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("watch", _TEXT, usage="%(prog)s [RUN] [--every S] [--once]")
    add = parser.add_argument
    text = "run folder (default: the newest run in results/)"
    add("run", nargs="?", type=Path, metavar="RUN", help=text)
    text = "refresh interval in seconds (default: 2)"
    seconds = real(lambda s: 0.1 <= s <= 3600, "must be a number of seconds from 0.1 to 3600")
    add("--every", type=seconds, default=2.0, metavar="S", help=text)
    add("--once", action="store_true", help="print the state of the run once and exit")
    return parser


def _watch(options: Namespace) -> None:
    from hpc3d.analyze.live import ASCII_BARS, BARS, OVER, LiveRun

    live = LiveRun(_run(options.run), BARS if _shows(BARS) else ASCII_BARS)
    show = _print if options.once else _redraw if sys.stdout.isatty() else _adding()
    try:
        while True:
            live.update(time.time())
            show(live)
            if options.once or live.state in OVER or sys.stdout.unread:
                return
            time.sleep(options.every)
    except KeyboardInterrupt:
        return


def _print(live: LiveRun) -> None:
    print("\n".join(live.screen(_size().columns)), flush=True)


def _redraw(live: LiveRun) -> None:
    size = _size()
    sys.stdout.write(Controls(_TOP))
    for number, line in enumerate(live.screen(size.columns)[: size.lines - 1]):
        sys.stdout.write(Controls(_REST_OF_LINE))
        colors.say(line, "" if number else _STYLES.get(live.state, "bold"))
    sys.stdout.write(Controls(_REST_OF_SCREEN))
    sys.stdout.flush()


def _adding() -> Callable[[LiveRun], None]:
    """Return a function that prints the state of a run if it has changed since the last call."""
    said: tuple[int, str] | None = None

    def add(live: LiveRun) -> None:
        nonlocal said
        if (new := (len(live.losses), live.state.split()[0])) != said:
            print(live.line(), flush=True)
            said = new

    return add


def _size() -> os.terminal_size:
    return shutil.get_terminal_size((80, 24))


def _shows(letters: str) -> bool:
    """Return True if standard output can encode all characters in `letters`."""
    try:
        letters.encode(sys.stdout.encoding or "utf-8")
    except UnicodeError:
        return False
    return True


def _run(given: Path | None) -> Path:
    """Return the given run folder, or the newest one; raise ValueError if there is none."""
    if given is None:
        runs = [path.parent for path in Path("results").glob("*/config.toml")]
        if not runs:
            raise ValueError("results/ contains no run; specify one: python -m hpc3d.watch RUN")
        return max(runs, key=lambda path: (path / "config.toml").stat().st_mtime_ns)
    if not (given / "config.toml").is_file():
        raise ValueError(f"{given} is not a run folder; specify one, such as results/NAME-STAMP")
    return given


if __name__ == "__main__":
    sys.exit(main())
