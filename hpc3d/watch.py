"""Watch a run from another terminal while it goes on: loss, speed, time left, who waits.

python -m hpc3d.watch results/RUN
python -m hpc3d.watch                  # the newest run in results/
"""

from __future__ import annotations

import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hpc3d.cli import Parser, run

_TEXT = """\
Shows what the folder of a run says now, again and again until Ctrl-C: step k of N, time left,
loss, tokens/s, memory, evaluations, and by axis of the mesh how much of a step ranks are in calls
and how much of it they wait for others. It only reads files, so it may run on any machine that
sees the folder, over ssh too. What ranks do inside of a step is as new as their last segments,
half a minute at most. A run that has ended is shown once."""

_ENDED = ("ended", "stopped", "failed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("watch", _TEXT, usage="%(prog)s [RUN] [--every S] [--once]")
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="(default: the newest)")
    parser.add_argument("--every", type=_seconds, default=2.0, metavar="S", help="seconds (2)")
    parser.add_argument("--once", action="store_true", help="show it once")
    options = parser.parse_args(argv)
    return run("watch", lambda: _watch(options))


def _seconds(text: str) -> float:
    from argparse import ArgumentTypeError

    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise ArgumentTypeError(f"{text:.40}: must be a number of seconds from 0.1 to 3600")
    return value


def _watch(options: Namespace) -> None:
    from hpc3d.analyze.live import screen

    folder = _run(options.run)
    terminal = sys.stdout.isatty()
    try:
        while True:
            lines = screen(folder, shutil.get_terminal_size((80, 24)).columns)
            if terminal and not options.once:
                _clear()
            print("\n".join(lines), flush=True)
            if options.once or lines[0].endswith(_ENDED):
                return
            time.sleep(options.every)
    except KeyboardInterrupt:
        return


def _clear() -> None:
    """Empty the screen: past the stream that shows what a terminal obeys."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    stream.write("\x1b[H\x1b[2J")


def _run(given: Path | None) -> Path:
    """The folder of a run; ValueError where there is none."""
    if given is None:
        runs = [path.parent for path in Path("results").glob("*/config.toml")]
        if not runs:
            raise ValueError("results/ holds no run: name one, python -m hpc3d.watch RUN")
        return max(runs, key=lambda path: (path / "config.toml").stat().st_mtime_ns)
    if not (given / "config.toml").is_file():
        raise ValueError(f"{given}: no run is there; name a folder results/NAME-STAMP")
    return given


if __name__ == "__main__":
    sys.exit(main())
