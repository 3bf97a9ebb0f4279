"""Fixtures of the tests of explanations."""

from tests.planner.conftest import few_sets

__all__ = ["few_sets"]
