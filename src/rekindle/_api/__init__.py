"""The functions that users call: arguments are checked here, once."""
