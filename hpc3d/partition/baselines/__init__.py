"""Planners of other systems, evaluated with the cost model of hpc3d's own planner.

Each planner is reimplemented from its publication. Each module cites the publication and
lists the assumptions.
"""
