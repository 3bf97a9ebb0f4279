"""Bytes and times of a training step, measured on the device that runs it."""
