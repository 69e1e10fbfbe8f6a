"""Entry point: `hpc3d COMMAND` and `python -m hpc3d COMMAND` run the module hpc3d.COMMAND.

MPI ranks also start here. The command's module is imported first, because it sets environment
variables that NumPy and MPI read when they are loaded.
"""

import sys
from importlib import import_module

COMMANDS = (
    *("init", "train", "generate", "evaluate", "plan", "simulate", "layout", "sweep", "partition"),
    *("watch", "report", "reproduce", "checkpoint", "prepare", "bench", "doctor"),
)
USAGE = """
    hpc3d COMMAND ...  =  python -m hpc3d COMMAND ...  =  python -m hpc3d.COMMAND ...
    mpirun -np N hpc3d train ...         run a command on N ranks
    hpc3d COMMAND --help                 description and arguments of a command
    hpc3d --version
    hpc3d --completion bash|zsh|fish     shell completion: source <(hpc3d --completion bash)
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command named by the first argument; return 2 if there is no such command."""
    command, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in COMMANDS:
        return import_module(f"hpc3d.{command}").main(words)
    from hpc3d.runtime import environment

    if environment.number_in(environment.OWN_RANK, default=0):
        return 0  # a nonzero code would make the launcher kill rank 0 before the error is printed
    from hpc3d.console.exit_codes import BAD_INPUT
    from hpc3d.console.sanitize import OutputError, file_and_reason, sanitized_streams

    with sanitized_streams():
        try:
            code = complete(words) if command == "--completion" else answer(command)
            sys.stdout.flush()
        except OutputError as error:
            print(f"hpc3d: {file_and_reason(error)}", file=sys.stderr)
            return BAD_INPUT
        return code


def complete(words: list[str]) -> int:
    """Print the completion script for a shell; return the exit code."""
    from hpc3d.console.exit_codes import BAD_INPUT
    from hpc3d.library.completion import SHELLS, script

    if len(words) != 1 or words[0] not in SHELLS:
        print(f"hpc3d: --completion: choose one of {', '.join(SHELLS)}", file=sys.stderr)
        return BAD_INPUT
    print(script(words[0], COMMANDS))
    return 0


def answer(word: str) -> int:
    """Handle the options --help and --version; report any other argument as an unknown command."""
    import hpc3d

    if word in ("-h", "--help"):
        print(listing())
    elif word == "--version":
        print(f"hpc3d {hpc3d.__version__}")
    else:
        return refuse(word)
    return 0


def listing() -> str:
    """Return the help text: description, usage, and one line per command."""
    import hpc3d

    lines = [f"  {command:<12}{summary(command)}" for command in COMMANDS]
    return "\n".join([f"hpc3d {hpc3d.__version__}: {hpc3d.__doc__}", USAGE, *lines])


def summary(command: str) -> str:
    """Return the first line of a command's module docstring.

    The module is parsed, not imported, so that NumPy and MPI are not loaded.
    """
    import ast
    from importlib.resources import files

    module = files("hpc3d") / f"{command}.py"
    if not module.is_file():
        module = files("hpc3d") / command / "__init__.py"
    source = module.read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).partition("\n")[0]


def refuse(word: str) -> int:
    """Print an error for an unknown command, and return the exit code."""
    from difflib import get_close_matches

    from hpc3d.console.exit_codes import BAD_INPUT

    near = get_close_matches(word, COMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
    print(f"hpc3d: {word}: no such command; {hint}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
