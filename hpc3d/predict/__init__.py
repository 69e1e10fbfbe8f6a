"""Prediction of the time, memory and communication of a run; search for the fastest layout."""
