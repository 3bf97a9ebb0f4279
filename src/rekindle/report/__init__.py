"""Profiles and plans for people."""
