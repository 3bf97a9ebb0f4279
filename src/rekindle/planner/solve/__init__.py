"""One candidate for each block, within a budget."""
