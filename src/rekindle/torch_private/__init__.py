"""Every touch of what torch keeps private, one small function each."""
