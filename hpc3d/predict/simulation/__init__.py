"""Simulation of the program on abstract arrays, with a simulated clock for a machine."""
