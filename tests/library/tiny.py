"""A very small model for tests of prediction, planning and training."""

MODEL = {"model.layers": 1, "model.hidden": 32, "model.heads": 4, "model.sequence": 8}
TINY = {**MODEL, "train.batch": 8, "train.steps": 3}
WORDS = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
