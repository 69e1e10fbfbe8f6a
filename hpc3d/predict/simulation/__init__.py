"""Simulation of the program on abstract arrays with a machine's simulated clock."""
