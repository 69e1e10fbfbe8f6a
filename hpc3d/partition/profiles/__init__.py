"""Measured times of a module's pieces, for a planner that asks no machine's formulas."""
