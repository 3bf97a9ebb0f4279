"""One training step of a model, as users give it: a batch, or a function that returns the loss."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.planner.gradient_fingerprints import Fingerprints, Gathering
from rekindle.planner.loss import A_FUNCTION, Loss, in_form, scalar_in
from rekindle.planner.measure.memory_meter import bytes_of, storages_of
from rekindle.planner.ranks.rank_sync import wait_for_all_ranks
from rekindle.planner.types import LossSource
from rekindle.regions.recompute.call_on_copies import copies_for
from rekindle.torch_private.pytrees import tree_flatten, tree_leaves
from rekindle.torch_private.storages import storage_key


@dataclass(frozen=True)
class Call:
    """What a model is called with, by position and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Step:
    """One training step of a model on a batch, forward and backward."""

    loss_source: LossSource
    """Where the loss comes from; known after the first forward."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None = None) -> None:
        self.model = model
        self.batch = batch
        self.loss_source = "model" if loss is None else "given"
        self.output_held = 0
        """Bytes of the output that stay until the backward has ended; known after a step."""
        self._given_loss = loss
        self.function: Callable[[], Any] | None = None
        self._others: dict[Tensor, Tensor | None] | None = None
        """What else gets gradients, with those it had; None before the first step."""
        self._gathering: Gathering | None = None
        self.before_each: Callable[[], None] | None = None
        """Called before each forward, if set: puts random states back, so that all are alike."""
        self.is_first = False
        """Whether the next run is the first of several: then ranks wait for each other in it."""
        self._leaves_batch = False
        """Whether the step was seen to leave the objects in its batch as they are."""
        self.call = Call((), {})
        if isinstance(batch, Call):
            self.call = batch
        elif callable(batch) and not isinstance(batch, Tensor):
            self.function = batch
        elif isinstance(batch, Mapping):
            self.call = Call((), dict(batch))
        elif isinstance(batch, tuple | list):
            self.call = Call(tuple(batch), {})
        else:
            self.call = Call((batch,), {})

    def __call__(self) -> None:
        """Run it.

        Where the loss is given, the output lives until the backward has ended, as in the usual
        loop: `out = model(x); loss = criterion(out); loss.backward()`.
        """
        out, loss = self._forward()
        if self._given_loss is None:
            del out
        if self.is_first:  # a rank that failed in its forward does not come to reduce gradients
            self.is_first = False
            wait_for_all_ranks()
        if self._others is None:
            own = set(self.model.parameters())
            self._others = {leaf: leaf.grad for leaf in _leaves_of(loss) if leaf not in own}
            for leaf in self._others:
                leaf.grad = None
        loss.backward()
        # The memory of a scalar may be larger: `mse_loss` leaves it in that of all its elements.
        self.output_held = max(bytes_of([loss]) - loss.nbytes, 0)
        if self._given_loss is not None:
            self.output_held += self._bytes_made(out)

    @contextmanager
    def leaving_no_gradients(self) -> Iterator[None]:
        """What is outside the model, as a head or the batch, ends with the gradients it had."""
        try:
            yield
        finally:
            for leaf, gradient in (self._others or {}).items():
                leaf.grad = gradient
            self._others = None

    def fingerprints(self) -> Fingerprints:
        """Run it from gradients of zero; returns the fingerprints of all that it makes.

        Of the model by the parameter's name, and of each leaf outside it by that. Gradients that
        are let go of as they come are looked at before.
        """
        with torch.no_grad():
            for gradient in self._gradients().values():
                if gradient is not None:
                    gradient.zero_()
        gathering = self._gathering = Gathering()
        try:
            self()
        finally:
            self._gathering = None
        made = self._gradients()
        for key, gradient in made.items():
            if gradient is not None and key not in gathering:
                gathering.add(key, gradient)
        found = gathering.read()
        return {key: found[key] for key in made if key in found}

    def see_gradient(self, name: str, gradient: Tensor) -> None:
        """A gradient of the model's is there, and is about to be let go of."""
        if self._gathering is not None:
            self._gathering.add(name, gradient)

    def _gradients(self) -> dict[Any, Tensor | None]:
        """The gradients that there are: of the model by name, and of each leaf outside it."""
        own: dict[Any, Tensor | None] = {n: p.grad for n, p in self.model.named_parameters()}
        return own | {leaf: leaf.grad for leaf in self._others or {}}

    def loss(self) -> Tensor:
        """Run the forward; returns the loss."""
        return self._forward()[1]

    def _forward(self) -> tuple[Any, Tensor]:
        """What the model returns, and the loss."""
        if self.before_each is not None:
            self.before_each()
        out = self._call_model() if self.function is None else self.function()
        if self._given_loss is not None:
            return out, self._given_loss(out, self._batch_for(self._given_loss))
        loss = scalar_in(out)
        if loss is None:
            self.loss_source = "none"
            loss = _sum_of(out)
        return out, loss

    def _call_model(self) -> Any:
        """What the model returns; the first time, on copies of the objects in the batch."""
        args, kwargs = self.call.args, self.call.kwargs
        copies = None if self._leaves_batch else copies_for(self.model.forward, args, kwargs)
        if copies is None:
            return self.model(*args, **kwargs)
        out = self.model(*copies.args, **copies.kwargs)
        written_to = copies.written_to()
        if written_to:
            raise ValueError(
                f"The step writes to its batch, to {', '.join(written_to)}, and planning runs it "
                "many times. Plan on a batch without that: the model can be called with it "
                "afterwards, and its gradients are right. What it holds is not in the plan."
            )
        self._leaves_batch = True
        return out

    def _batch_for(self, loss: Loss) -> Any:
        """The batch as a user gave it; that of a later call in the same form."""
        if isinstance(self.batch, Call) and loss.takes_batch:
            return in_form(loss.form, self.model, self.call.args, self.call.kwargs)
        return self.batch

    def _bytes_made(self, out: Any) -> int:
        """The size of what the model returned, without what it was given and its own tensors."""
        known = [*self.model.parameters(), *self.model.buffers(), *self.tensors()]
        keys = {storage_key(storage) for tensor in known for storage in storages_of(tensor)}
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return bytes_of(
            leaf
            for leaf in leaves
            if not any(storage_key(storage) in keys for storage in storages_of(leaf))
        )

    def tensors(self) -> list[Tensor]:
        """What the batch consists of."""
        leaves = tree_leaves((self.call.args, self.call.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def there_before(self) -> list[Tensor]:
        """Tensors that are there before it runs: the model, the batch, and gradients so far."""
        gradients = [gradient for gradient in self._gradients().values() if gradient is not None]
        return [*self.model.parameters(), *self.model.buffers(), *self.tensors(), *gradients]

    def shapes(self) -> str:
        """The batch in words, by which it is known again."""
        if self.function is not None:
            return A_FUNCTION
        if not isinstance(self.batch, Call):
            return str(shapes_of(self.batch))
        args, kwargs = shapes_of((self.call.args, self.call.kwargs))
        by_position = args[0] if len(args) == 1 else args
        return str(by_position if not kwargs else kwargs if not args else (*args, kwargs))


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward gives gradients to."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        stack += [following for following, _ in node.next_functions]
    return found


def shape_of(leaf: Any) -> Any:
    """What one part of a batch, or of what a block is given, is: for people, and to compare."""
    if isinstance(leaf, Tensor):
        learns = " that learns" if leaf.requires_grad else ""
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{learns}"
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf).__name__


def shapes_of(tree: Any) -> Any:
    """A batch, or a block's arguments, with words in the place of tensors.

    What is a container to torch and no list, tuple or dict, as a `PackedSequence`, becomes a tuple
    of its name and its parts: it would not take words for tensors.
    """
    if type(tree) is dict:
        return {key: shapes_of(item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(shapes_of, tree))
    # Asked of the tree, then of its parts. A closure over the tree would hold it, with the graphs
    # behind its tensors, until the garbage collector comes: what flattens is a cycle.
    are_leaves = iter([False])
    leaves, spec = tree_flatten(tree, is_leaf=lambda _: next(are_leaves, True))
    if spec.is_leaf():
        return shape_of(tree)
    return (type(tree).__name__, *map(shapes_of, leaves))


def _sum_of(out: Any) -> Tensor:
    """The sum of all outputs that require a gradient, which stands for a loss."""
    leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError("The step's result requires no gradient: there is nothing to train")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()
