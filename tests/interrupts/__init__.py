"""Ctrl-C at every moment of a training step: `python -m tests.interrupts` tries thousands."""
