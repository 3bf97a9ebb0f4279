"""Regions inside `torch.compile`: handed to torch's operator, guarded, and offloaded in graphs."""
