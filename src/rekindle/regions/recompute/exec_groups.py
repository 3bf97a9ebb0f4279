"""Exec groups: several backward calls over disjoint parts of one graph replay a region once."""

from typing import Self

from rekindle.torch_private.autograd_graph import exec_group, set_exec_group


class GraphExecGroup:
    """Backward calls under one instance replay each region at most once. As torch's class.

    The calls must run disjoint parts of the graph, as a pipeline schedule does that computes the
    gradients of a stage's inputs first and those of its weights later.

    >>> import torch, rekindle
    >>> x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> a, b = rekindle.checkpoint(lambda x, w: (x.exp().sin(), w.exp().sin()), x, w)
    >>> with rekindle.observe() as seen, rekindle.GraphExecGroup():
    ...     a.sum().backward()
    ...     b.sum().backward()
    >>> seen.total.replays
    1
    """

    def __enter__(self) -> Self:
        if exec_group() is not None:
            raise RuntimeError(
                f"GraphExecGroup contexts cannot be nested: already inside {exec_group()}. "
                "Leave the one before you enter the next."
            )
        set_exec_group(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_exec_group(None)

    @classmethod
    def _get_current_group(cls) -> "GraphExecGroup | None":
        return exec_group()  # type: ignore[no-any-return]
