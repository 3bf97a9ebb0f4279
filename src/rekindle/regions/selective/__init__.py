"""Selective checkpointing: a policy decides about every op, and all decisions work in eager.

A region's forward is recorded op by op (`recorder`), as values and the calls that made them
(`op_graph`). What the policy keeps is held; anything else that backward asks for is made again by
running just the calls it depends on, from what is held, below autograd and without the region's
own code.
"""
