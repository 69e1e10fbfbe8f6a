"""Partitions of other systems, timed under the same costs as ours.

Each planner is reimplemented from its publication. Its module names the source and the
assumptions.
"""
