"""Regions inside `torch.compile`."""
