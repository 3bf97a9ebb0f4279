"""What runs in training: regions of a forward, and what becomes of their activations."""
