"""The recompute engine: regions that are run again in backward.

Begin with `recompute_region`: one call of a function, from its forward to its last activation.
"""
