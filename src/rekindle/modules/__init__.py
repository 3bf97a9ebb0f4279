"""Whole modules of a model as regions."""
