"""Measurements of rekindle against plain eager and its peers: `scripts/bench NAME` runs one."""
