"""What a training step does, seen in one run: blocks, ops, saved tensors, lifetimes."""
