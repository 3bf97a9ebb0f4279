"""The recompute engine: regions that are run again in backward.

`frame` is where to begin: one call of a region, from forward to its last activation.
"""
