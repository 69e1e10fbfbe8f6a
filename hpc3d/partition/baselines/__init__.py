"""Planners of other systems, evaluated with the same cost model as the planner of hpc3d.

Each planner is reimplemented from its publication. Its module cites the source and lists the
assumptions.
"""
