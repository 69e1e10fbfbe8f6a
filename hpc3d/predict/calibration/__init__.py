"""Calibration of a machine model from traces of runs on the machine."""
