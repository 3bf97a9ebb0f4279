"""What is said of a replay that does not match its forward, and where."""
