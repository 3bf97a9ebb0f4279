"""Tensors that are evaluated row by row: logits, the loss of each row, and its gradient.

```
head(hidden) ─by_rows─▶ RowTensor ─casts, shifts, softmax─▶ RowTensor ─loss of each row─▶ tensor
                            ▲                                   backward ▼
      gradient of logits ◀──┴───────casts, shifts, softmax────── RowTensor
```

Between a head and its loss, a model makes copies of its logits: in float32, shifted by one, their
log-softmax; and backward makes as many gradients. None of them is needed as a whole: the loss of a
token depends on its row alone. A `RowTensor` is such a copy as an expression: it holds the op and
what it was given, and is evaluated a few rows at a time where a loss asks for its rows. Autograd
sees the ops that it always sees, and each of them runs on some rows at a time with the kernel that
runs it on all: so the numbers are the same, bit for bit.

An op that looks at logits in another way gets all of them, as a tensor.
"""
