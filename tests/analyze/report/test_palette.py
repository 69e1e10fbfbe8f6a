"""Colours that can be told apart."""

from hpc3d.analyze.report import palette


def test_no_colour_is_there_twice():
    colours = [value for name, value in vars(palette).items() if name.isupper()]
    single = [value for value in colours if isinstance(value, str)]
    assert len({*single}) == len(single) >= 12
    assert {*palette.COLOURS} <= {*single} and len({*palette.COLOURS}) == len(palette.COLOURS)
