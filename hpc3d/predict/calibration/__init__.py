"""Calibration of a machine from traces of runs on it."""
