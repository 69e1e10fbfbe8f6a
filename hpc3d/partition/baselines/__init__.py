"""Planners of other systems, evaluated with the cost model of hpc3d's own planner.

Each planner is reimplemented from its publication. The module of each planner cites the source
and lists the assumptions.
"""
