"""Configuration of a run: the dataclasses of an input file, its parser and validation rules."""
