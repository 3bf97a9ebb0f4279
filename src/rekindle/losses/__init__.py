"""Losses of tokens over a large vocabulary, without logits of all tokens at once.

A row function (`row_function.py`) computes values per token from rows of logits, and its gradient.
Three drivers run one over all tokens:

    exact.py    logits by one whole matmul, the row function on a few rows at a time
    tiled.py    the matmul by tiles too; tiles run again in backward
    summed.py   the same for a loss that is a sum: no tile runs again
"""
