"""Instruments that tracing and measuring share: memory meters, clocks, autocast's cache, a lock."""
