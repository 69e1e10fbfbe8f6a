"""A model that is predicted, planned and trained in no time."""

MODEL = {"layers": 1, "hidden": 32, "heads": 4, "sequence": 8}
TINY = {"model": MODEL, "train": {"batch": 8, "steps": 3}}
