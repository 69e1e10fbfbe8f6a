"""Measured times of a module's pieces, which replace the formulas of a machine in planning."""
