"""Configuration of a run: dataclasses of an input file, their reader and validation rules."""
