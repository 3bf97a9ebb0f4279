"""Tests of a training step's memory, which need no GPU: `assert_peak`.

With pytest, `@pytest.mark.peak("24GiB")` does the same for the model and the batch that a test
returns; `_rekindle_pytest.py`, beside this package, is the plugin.
"""

from rekindle._api.peaks import assert_peak

__all__ = ["assert_peak"]
