"""Selective checkpointing: a policy gives every op its fate, and all the fates work in eager.

A region's forward is recorded op by op (`mode`), as values and the calls that made them (`record`).
What the policy keeps is held; anything else that backward asks for is made again by running just
the calls it depends on, from what is held, below autograd and without the region's own code.
"""
