"""No line of any command's output contains a terminal control character from an input."""

import csv
import json
import os
import re
import sys
import tomllib
from io import StringIO
from pathlib import Path

import h5py
import numpy as np
import pytest

import hpc3d.__main__
from hpc3d import bench, checkpoint, doctor, plan, prepare, report, simulate, train
from hpc3d.checkpoints.inspect import shapes_of
from hpc3d.checkpoints.new_run import begin
from hpc3d.config.load import literal
from hpc3d.console.command_line import run
from hpc3d.console.exit_codes import BadData
from hpc3d.console.sanitize import (
    Problems,
    SanitizedStream,
    all_results,
    counted,
    lines_of,
    nearest_values,
    sanitized,
    sanitized_streams,
    sanitized_tree,
)
from hpc3d.diagnose import node_checks
from hpc3d.runtime.launch import what_happened
from hpc3d.trace.locate import trace_of
from hpc3d.training import run_folder as folders
from hpc3d.training.log import Log
from tests.analyze.small import small
from tests.checkpoints import drawn_models
from tests.elided import elided
from tests.pipeline.mixes import config_of
from tests.runs import ended, plan_of
from tests.test_bad_inputs import MACHINE, SHIPPED

HOSTILE = {
    "escape": "\x1b[31mred",
    "C1": "\x9b31mred",
    "end of line": "a\nhpc3d.train: all is well",
    "return": "a\rb",
    "record separator": "a\x1eb",
    "line separator": "a\u2028b\u2029c\x85d",
    "delete": "a\x7f\x08b",
    "right to left": "a\u202egpj.exe",
    "tag": "a\U000e0041b",
}
BYTES = "a\udcff\udc9bb"  # of a word that is not UTF-8
UNWRITTEN = "standard output: cannot be written (No space left on device)"
EVIL = "".join(HOSTILE.values())
WORD = pytest.mark.parametrize("evil", [*HOSTILE.values(), BYTES], ids=[*HOSTILE, "bytes"])
TEXT = pytest.mark.parametrize("evil", HOSTILE.values(), ids=HOSTILE)


@pytest.mark.parametrize("evil", [*HOSTILE.values(), BYTES, "\0"], ids=[*HOSTILE, "bytes", "NUL"])
def test_hostile_text_becomes_one_printable_line(evil):
    shown = sanitized(evil)
    assert shown.isprintable() and len(shown) > len(evil)
    assert sanitized(shown) == shown
    if not set(evil) & set(BYTES[1:-1]):
        assert json.loads(f'"{shown}"' if "\\U" not in shown else '""') in (evil, "")
        assert tomllib.loads(f"a = {literal(evil)}")["a"] == evil


def test_printable_characters_of_all_languages_are_kept():
    text = "Größe 中文 עברית العربية हिन्दी 🙂 ½ — |<&\\"
    assert sanitized(text) == text
    assert sanitized_tree({"\x1b": [("\x1b", 1, None)]}) == {"\\u001b": [("\\u001b", 1, None)]}


def test_error_is_one_line_and_several_problems_are_several_lines():
    assert lines_of(ValueError("a\nb")) == ["a\\nb"]
    (line,) = lines_of(ValueError(f"a.csv: {'x' * 5000}; remedy"))
    assert line.startswith("a.csv: x") and line.endswith("x; remedy") and len(line) < 1010
    assert lines_of(Problems(["a\nb", "c\x1e"])) == ["a\\nb", "c\\u001e"]
    assert lines_of(OSError(28, "No space left on device", "a\x1b")) == [
        "a\\u001b: No space left on device"
    ]
    assert lines_of(FileNotFoundError("x not found.")) == ["x not found"]


def test_errors_of_all_functions_are_reported_together():
    assert all_results(lambda: 1, lambda: "a") == [1, "a"]

    def wrong():
        raise Problems(["b", "c"])

    with pytest.raises(Problems) as refused:
        all_results(lambda: int("a"), lambda: 1, wrong)
    first, *others = refused.value.lines
    assert first.endswith("'a'") and others == ["b", "c"]


class Terminal:
    """Output of a process, which must consist of lines of printable characters."""

    def __init__(self, capsys):
        self.capsys = capsys

    def lines(self):
        out, err = self.capsys.readouterr()
        for line in f"{out}{err}".split("\n"):
            assert line.isprintable(), line
        return out.split("\n")[:-1], err.split("\n")[:-1]


@pytest.fixture
def terminal(capsys):
    return Terminal(capsys)


def refused(terminal, main, *words):
    """Return the error line with which a command rejects its arguments."""
    assert ended(main, *words) == 2
    _, (line,) = terminal.lines()
    return line


# The words of a command line, {} where the hostile one stands.
WORDS = {
    "report": (report, "{}"),
    "report exports": (report, "run", "--export", "{}"),
    "report peak": (report, "run", "--peak", "{}"),
    "report steps": (report, "run", "--steps", "{}"),
    "report step": (report, "run", "--step", "{}"),
    "simulate": (simulate, "{}.toml", "--machine", MACHINE),
    "simulate machine": (simulate, SHIPPED[0], "--machine", "{}.toml"),
    "simulate key": (simulate, SHIPPED[0], "--machine", MACHINE, "--{}", "1"),
    "simulate value": (simulate, SHIPPED[0], "--machine", MACHINE, "--mesh.x", "{}"),
    "simulate name": (simulate, SHIPPED[0], "--machine", MACHINE, "--name", "{}"),
    "schedule": (simulate, "schedule", "--name", "{}", "--stages", "2", "--microbatches", "2"),
    "schedule file": (
        *(simulate, "schedule", "--name", "csv:{}", "--stages", "2", "--microbatches", "2"),
    ),
    "plan": (plan, "{}.toml", "--ranks", "2"),
    "plan ranks": (plan, SHIPPED[0], "--ranks", "{}"),
    "plan memory": (plan, SHIPPED[0], "--ranks", "2", "--memory", "{}"),
    "prepare": (prepare, "{}", "-o", "tokens.h5"),
    "prepare output": (prepare, "text.txt", "-o", "{}"),
    "prepare folder": (prepare, "text.txt", "-o", "{}/tokens.h5"),
    "prepare tokenizer": (prepare, "text.txt", "--tokenizer", "{}"),
    "prepare verify": (prepare, "--verify", "{}"),
    "checkpoint": (checkpoint, "{}"),
    "checkpoint show": (checkpoint, "show", "{}"),
    "checkpoint verify": (checkpoint, "verify", "{}"),
    "checkpoint export": (checkpoint, "export", "{}", "-o", "there"),
    "checkpoint import": (checkpoint, "import", "{}", "-o", "there"),
    "checkpoint setting": (checkpoint, "show", "there", "--data.{}", "1"),
    "bench": (bench, "{}"),
    "bench machine": (bench, "findings", "--machine", "{}.toml"),
    "doctor": (doctor, "--timeout", "{}"),
}


@WORD
@pytest.mark.parametrize("place", WORDS)
def test_hostile_argument_is_rejected_in_one_line(place, evil, terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *words = WORDS[place]
    refused(terminal, command.main, *(str(word).replace("{}", evil) for word in words))


# The same of what `train` is told, of which rank 0 reads all.
ASKED = [
    ["{}.toml"],
    ["--{}", "1"],
    ["--model.{}", "1"],
    ["--{}.hidden", "1"],
    ["--mesh.x", "{}"],
    ["--name", "{}"],
    ["--data.path", "{}"],
    ["--data.path", "{}.h5"],
    ["--parallel.schedule", "{}"],
    ["--parallel.schedule", "csv:{}"],
    ["--parallel.split", '{{m="{}"}}'],
    ["--mesh.order", "{}"],
    ["--resume", "{}"],
    ["INPUT", "{}"],
]


@WORD
@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_hostile_train_options_are_rejected_in_one_line(words, evil, terminal, tmp_path):
    words = [word.replace("{{", "{").replace("{}", evil) for word in words]
    words = [str(SHIPPED[0]) if word == "INPUT" else word for word in words]
    options = ["--run.out", str(tmp_path / "none")]
    assert run("train", lambda: plan_of(words + options)) == 2
    _, lines = terminal.lines()
    assert lines and all(line.startswith("hpc3d.train: ") for line in lines)
    assert len(lines) <= 2 and not (tmp_path / "none").exists()


def asked(words):
    return train.read_command_line(1, words)


@pytest.mark.parametrize("words", [["--run.out", BYTES], [f"--{BYTES}=1"], ["--name", BYTES]])
def test_non_utf8_arguments_are_rejected_with_their_option(words, terminal):
    assert run("train", lambda: asked(words)) == 2
    _, (line,) = terminal.lines()
    assert line.startswith(f"hpc3d.train: {sanitized(words[0].partition('=')[0])} ")
    assert "not valid UTF-8" in line


@pytest.mark.parametrize("key", ["run.out", "data.path", "parallel.schedule"])
def test_nul_character_is_rejected_with_its_key(key, terminal, tmp_path):
    section, name = key.split(".")
    path = tmp_path / "input.toml"
    path.write_text(f'[{section}]\n{name} = "csv:a\\u0000b"\n')
    assert run("train", lambda: asked([str(path)])) == 2
    _, (line,) = terminal.lines()
    assert line.startswith(f"hpc3d.train: {key} = 'csv:a\\x00b': ")


@TEXT
def test_keys_and_values_of_files_are_sanitized(evil, terminal, tmp_path):
    path, name = tmp_path / "input.toml", literal(evil)
    tables = [f"{name} = 1", f"[{name}]", f"[model]\n{name} = 1", f"[mesh]\nx = {name}"]
    tables += [f"name = {name}", f"[parallel.split]\n{name} = 'x'", f"a = 1 {evil}"]
    for text in tables:
        path.write_text(text + "\n", encoding="utf-8")
        refused(terminal, simulate.main, path, "--machine", MACHINE)
        machine = MACHINE.read_text().replace("name =", f"name = {name} # ", 1)
        path.write_text(machine if text.startswith("name") else text, encoding="utf-8")
        refused_machine(terminal, path)


def refused_machine(terminal, path):
    assert ended(simulate.main, SHIPPED[0], "--machine", path) == 2
    _, lines = terminal.lines()
    assert lines


def test_characters_outside_the_terminal_encoding_are_escaped(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with sanitized_streams():
            print("ä\u2028\x7f", BYTES)
    assert (tmp_path / "out").read_text() == "\\xe4\\u2028\\u007f a\\udcff\\udc9bb\n"


def pipe_without_reader():
    end, start = os.pipe()
    os.close(end)
    return open(start, "w")


def test_output_to_a_closed_pipe_is_discarded(monkeypatch):
    with pipe_without_reader() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with sanitized_streams():
            print("a", flush=True)
            assert sys.stdout.unread
            print("b", flush=True)


@pytest.mark.parametrize(
    "command",
    [lambda: run("test", lambda: print("a") or 3), lambda: 3 + ended(plan.main, "--help")],
    ids=["a command", "its help"],
)
def test_command_with_a_closed_output_pipe_returns_its_code(command, monkeypatch):
    with pipe_without_reader() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert command() == 3


def test_full_disk_on_stdout_is_reported_once(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("test", lambda: print("a")) == 2
    assert capsys.readouterr().err == f"hpc3d.test: {UNWRITTEN}\n"


@pytest.mark.parametrize(
    ("main", "name"), [(plan.main, "hpc3d.plan"), (hpc3d.__main__.main, "hpc3d")]
)
def test_help_on_a_full_disk_is_reported_once(main, name, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert ended(main, "--help") == 2
    assert capsys.readouterr().err == f"{name}: {UNWRITTEN}\n"


def test_missing_standard_streams_are_the_null_device(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with sanitized_streams():
        print("a")
        print("b", file=sys.stderr)
        assert sys.stdin.read() == ""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.close(stream.fileno())


@TEXT
def test_log_writes_one_sanitized_line_per_message(evil, terminal, tmp_path):
    log = Log(tmp_path / "train.log", True)
    log.say(f"run kept in {evil}")
    log.warn(evil)
    log.close()
    (line,), (warned,) = terminal.lines()
    assert line.endswith(f" {sanitized(evil)}") and warned == f"hpc3d.train: {sanitized(evil)}"
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == f"{line}\n{sanitized(evil)}\n"


@TEXT
def test_doctor_findings_are_sanitized(evil, terminal, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", evil)
    found = doctor.told(
        [next(node_checks.threads(1)), doctor.not_started("1 rank", "python", 1, f"say {evil}", 1)]
    )
    lines, _ = terminal.lines()
    assert len(found) == 2 and sum(line[:5] in ("warn ", "FAIL ") for line in lines) == 2


def test_invalid_lock_text_is_escaped(tmp_path, terminal):
    with folders.claim(tmp_path):
        (tmp_path / "lock").write_bytes(b"\x1b[31m\xff\x9b\nbad")
        assert run("train", lambda: folders.claim(tmp_path, patience=0)) == 2
    _, (line,) = terminal.lines()
    assert "\\u001b[31m" in line and "\\nbad;" in line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run with a checkpoint, in a folder with a hostile name."""
    folder = tmp_path_factory.mktemp("saved") / EVIL
    drawn_models.saved(folder, "x=1", 1)
    return folder


def test_checkpoint_commands_print_sanitized_paths(saved, terminal):
    assert ended(checkpoint.main, "show", saved) == 0
    assert ended(checkpoint.main, "verify", saved) == 0
    assert ended(checkpoint.main, "export", saved, "-o", saved / "out", "--force") == 0
    lines, errors = terminal.lines()
    assert len(lines) == 5 and not errors
    assert lines[1].count("step-00000001") == 1


@pytest.mark.parametrize("text", ["schedule", "key"])
def test_manifest_texts_are_sanitized(text, saved, terminal, tmp_path):
    folder = tmp_path / "step-00000001"
    (whole,) = (saved / "checkpoints").glob("step-*")
    folder.symlink_to(whole)
    manifest = json.loads((whole / "manifest.json").read_text())
    before = (whole / "manifest.json").read_text()
    change = {
        "schedule": ("schedule = ", f"schedule = {literal('csv:' + EVIL)} # "),
        "key": ("[model]\n", f"[model]\n{literal(EVIL)} = 1\n"),
    }
    manifest["config"] = manifest["config"].replace(*change[text])
    (whole / "manifest.json").write_text(json.dumps(manifest))
    try:
        assert ended(checkpoint.main, "show", folder) in (0, 2)
        assert ended(checkpoint.main, "verify", folder) in (0, 3)
    finally:
        (whole / "manifest.json").write_text(before)
    lines, errors = terminal.lines()
    assert (len(lines) > 3) == (text == "schedule") and len(errors) <= 2


@pytest.fixture(scope="module")
def trace_of_others(tmp_path_factory):
    """Trace in which every text is hostile."""
    path = tmp_path_factory.mktemp("trace") / "trace.h5"
    formula = f"=cmd|' /C calc'!A0{EVIL}<script>alert(1)</script>|[x](http://a.b)"
    attributes = dict.fromkeys(("run_id", "created_utc", "git", "mpi", "device"), formula)
    small(path, **attributes, missing=f"{formula}\n{formula}").close()
    with h5py.File(path, "r+") as file:
        names = file["strings/name"]
        names[:] = [f"{formula} {number}" for number in range(len(names))]
        file["groups/axis"][:] = formula
    return path


def test_report_of_a_hostile_trace_is_sanitized(trace_of_others, terminal, tmp_path):
    out = tmp_path / "out"
    assert ended(report.main, trace_of_others, "--out", out, "--tables", "--json") == 0
    lines, errors = terminal.lines()
    assert not errors and json.loads(lines[-1])["out"] == str(out)
    for path in [*(out / "tables").iterdir(), out / "report.md"]:
        text = path.read_text(encoding="utf-8")
        assert all(line.isprintable() for line in text.split("\n")), path
        if path.suffix == ".md":
            assert "<script>" not in text.replace(r"\<", ""), path
            assert r"\[x\](http" in text or "=cmd" not in text
            assert "|'" not in text.replace(r"\|", "")


def test_csv_cells_are_never_formulas_and_numbers_are_unquoted(trace_of_others, tmp_path):
    assert ended(report.main, trace_of_others, "--out", tmp_path, "--tables") == 0
    quoted = 0
    for path in (tmp_path / "tables").glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for value in row.values():
                    assert value[:1] not in ("=", "+", "@", "\t", "\r") or is_number(value)
                    assert value[:1] != "-" or is_number(value)
                    quoted += value.startswith("'=cmd|")
    assert quoted


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_run_folder_with_any_name_is_reported(trace_of_others, terminal, tmp_path):
    folder = tmp_path / (EVIL + BYTES)
    folder.mkdir()
    os.link(trace_of_others, folder / "trace.h5")
    assert trace_of(folder) == folder / "trace.h5"
    assert ended(report.main, folder, "--tables") == 0
    lines, _ = terminal.lines()
    assert lines[-1].endswith(f" {sanitized(str(folder / 'report'))}")


def initial_run(folder):
    config = config_of("schedule=none microbatches=1 vocabulary=29")
    shapes = shapes_of(config.model)
    begin(folder / "run", config, lambda name, config: np.zeros(shapes[name]))


@pytest.mark.parametrize("create", [folders.note_command, initial_run])
def test_command_line_is_stored_byte_for_byte(create, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", BYTES])
    create(tmp_path)
    (path,) = tmp_path.rglob("command.txt")
    assert os.fsencode(BYTES) in path.read_bytes()


def test_shipped_files_contain_only_printable_characters():
    for path in [*SHIPPED, *MACHINE.parent.glob("*.toml")]:
        text = Path(path).read_text(encoding="utf-8")
        assert all(line.isprintable() for line in text.split("\n")), path


def test_unwritable_log_is_named():
    log = Log(Path("/dev/full"), True)
    with pytest.raises(OSError, match="No space left on device") as full:
        log.say("a line")
    assert full.value.filename == "/dev/full"
    log.close()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(28, "No space left on device", "a\nb"),
            r"failed: No space left on device: a\nb; ... --resume",
        ),
        (SystemExit("a\nb"), r"exited with a\nb"),
        (BadData("a\x1b"), r"failed: a\u001b; ... --resume"),
    ],
)
def test_rank_failure_is_described_in_one_line(error, line):
    assert re.fullmatch(elided(line), what_happened(error))
    assert "--resume" not in what_happened(error, "generate")


def test_memory_error_of_a_plan_names_options_of_plans():
    said = what_happened(MemoryError("1 GB"), "partition")
    assert "parallel.offload, parallel.keep_dtype" in said and "--recompute full" in said
    assert "parallel.recompute" not in said and "hpc3d.plan" not in said


def test_output_file_on_a_full_disk_is_named(terminal):
    words = ["--name", "1f1b", "--stages", "2", "--microbatches", "2", "--csv", "/dev/full"]
    line = refused(terminal, simulate.main, "schedule", *words)
    assert line == "hpc3d.simulate: /dev/full: No space left on device"


def test_isolated_tab_is_kept_and_others_are_escaped():
    stream = StringIO()
    for part in ("a", "\t", "b\tc"):
        SanitizedStream(stream).write(part)
    assert stream.getvalue() == "a\tb\\tc"


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (1024, "rank", "1,024 ranks"),
        (1, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
    ],
)
def test_counted_nouns_are_singular_or_plural(number, noun, said):
    assert counted(number, noun) == said


@pytest.mark.parametrize(("number", "said"), [(2, "4"), (5, "4 or 8"), (9, "8")])
def test_nearest_values_are_on_both_sides_if_both_exist(number, said):
    assert nearest_values(range(4, 9, 4), number) == said
