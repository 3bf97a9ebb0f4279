"""Traces of training steps and of blocks: what runs, what autograd saves, and how long it lives."""
