"""Limits that several modules share.

Bounds on individual keys are in input_file.py. docs/limits.md lists and explains all limits.
This module uses only the standard library, because the parsers of all commands import it.
"""

INT32 = 2**31 - 1  # largest value of an int32 column in a trace
TRAINED_TYPES = "float64", "float32", "bfloat16", "float16"  # data types of parameters
MOST_RANKS = 2**20
MOST_LAYERS = 10_000
MOST_PASSES = 2**18  # maximum number of forward passes per schedule; schedules are held in memory
# Maximum number of steps, updates or sequences in a run; their sums fit in int64.
MOST_COUNT = 2**53
