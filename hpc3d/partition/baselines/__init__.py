"""How others cut a model: each baseline gives a layout that is timed under the same costs as ours.

They are written anew from what was published; each module names its source, and what it assumes.
"""
