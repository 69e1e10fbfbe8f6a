"""Numeric options."""

import pytest

from hpc3d.config.argument_types import Joined, figures, number_of_ranks, positive, real, width
from hpc3d.config.limits import MOST_RANKS
from hpc3d.console.command_line import Parser
from hpc3d.console.exit_codes import BAD_INPUT


def parsed(*words):
    parser = Parser("test", "a text")
    parser.add_argument("--count", type=positive)
    parser.add_argument("--ranks", type=number_of_ranks)
    parser.add_argument("--time", type=real(lambda value: 0 < value < 9, "must be below 9"))
    parser.add_argument("--figures", type=figures, action=Joined, default=("png",))
    parser.add_argument("--width", type=width)
    return parser.parse_args(words)


def test_whole_numbers_are_taken():
    found = parsed("--count", " 7 ", "--ranks", str(MOST_RANKS), "--time", "8.5")
    assert (found.count, found.ranks, found.time) == (7, MOST_RANKS, 8.5)
    found = parsed("--figures", "pdf,svg,pdf", "--width", "50.8mm")
    assert (found.figures, found.width) == (["pdf", "svg"], pytest.approx(2))


def test_lists_of_a_repeated_option_are_joined():
    assert parsed().figures == ("png",)
    assert parsed("--figures", "pdf", "--figures", "svg,pdf").figures == ["pdf", "svg"]


@pytest.mark.parametrize(
    "words",
    [
        ("--count", "0"),
        ("--count", "1.5"),
        ("--count", "٣"),  # a digit, but not one of ours
        ("--count", "9" * 5000),
        ("--ranks", str(MOST_RANKS + 1)),
        ("--time", "9"),
        ("--time", "nan"),
        ("--time", "a"),
        ("--figures", "pdf,gif"),
        ("--figures", "pdf", "--figures", "gif"),
        ("--width", "84"),
        ("--width", "1mm"),
        ("--coun", "1"),  # no abbreviations
        ("more",),
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_other_words_are_refused_in_a_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    line = capsys.readouterr().err
    assert ended.value.code == BAD_INPUT
    assert line.startswith("hpc3d.test: ") and line.count("\n") == 1


def test_value_that_begins_with_a_dash_is_explained(capsys):
    with pytest.raises(SystemExit):
        parsed("--count", "-5GB")
    assert "expected one argument; write --count=VALUE if the value begins with -; " in (
        capsys.readouterr().err
    )
