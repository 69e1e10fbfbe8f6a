"""Configuration: typed, frozen values of an input file, and their rules."""
