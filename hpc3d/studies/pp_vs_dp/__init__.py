"""Reproduction of the four findings of arXiv:2407.02081."""
