"""The errors that rekindle raises at run time.

    RuntimeError
    └── RekindleError          anything that goes wrong while a model trains
        ├── CheckpointError    a replay did not match its forward
        └── OffloadError       an activation could not be moved away, or be brought back

Misuse at the call is a plain `ValueError` or `TypeError`.
"""


class RekindleError(RuntimeError):
    """Base of every error that rekindle raises while a model trains."""


class CheckpointError(RekindleError):
    """A replay did not return what its forward did; the message says where they differ."""


class OffloadError(RekindleError):
    """There was no room for an activation, or it could not be read back; the message says why."""
