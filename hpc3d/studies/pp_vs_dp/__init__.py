"""Reproduce the findings of arXiv:2407.02081 on pipeline and data parallelism."""
