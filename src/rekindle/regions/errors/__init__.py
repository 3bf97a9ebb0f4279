"""Errors of a replay that does not match its forward: where, why, and what to try."""
