"""The engines that run in training: regions of a forward, and their activations."""
