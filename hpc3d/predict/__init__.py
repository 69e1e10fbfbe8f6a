"""Prediction of time, memory and communication of a run, and search for the best layout."""
