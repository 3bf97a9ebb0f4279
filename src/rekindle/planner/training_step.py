"""A training step as users describe it: a model and a batch, or a function that returns a loss."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.planner.gradient_fingerprints import FingerprintCollector, GradientFingerprints
from rekindle.planner.instruments.memory_meter import bytes_of, storages_of
from rekindle.planner.loss import A_FUNCTION, Loss, batch_in_form, find_loss
from rekindle.planner.ranks.rank_sync import wait_for_all_ranks
from rekindle.planner.types import LossSource
from rekindle.regions.recompute.call_on_copies import copies_for
from rekindle.torch_private.pytrees import tree_flatten, tree_leaves
from rekindle.torch_private.storages import storage_key


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one call of a model, by position and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TrainingStep:
    """One training step of a model on a batch, forward and backward."""

    loss_source: LossSource
    """The source of the loss; known after the first forward."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None = None) -> None:
        self.model = model
        self.batch = batch
        self.loss_source = "model" if loss is None else "given"
        self.output_held = 0
        """Bytes of the output that are alive until the backward has ended; known after a step."""
        self._given_loss = loss
        self.function: Callable[[], Any] | None = None
        self._others: dict[Tensor, Tensor | None] | None = None
        """Leaves outside the model that get gradients, with those they had; None before a step."""
        self._collector: FingerprintCollector | None = None
        self.before_each: Callable[[], None] | None = None
        """Called before each forward, if set: restores random states, so that runs are alike."""
        self.before_backward: Callable[[Tensor], None] | None = None
        """Called with the loss between forward and backward, if set."""
        self.is_first = False
        """True if the next run is the first of several: ranks wait for each other in it."""
        self.in_backward = False
        """True while the step's own backward runs; a backward inside the forward does not count."""
        self._leaves_batch = False
        """True once a run has shown that the step does not write to the objects in its batch."""
        self.call = ModelCall((), {})
        if isinstance(batch, ModelCall):
            self.call = batch
        elif callable(batch) and not isinstance(batch, Tensor):
            self.function = batch
        elif isinstance(batch, Mapping):
            self.call = ModelCall((), dict(batch))
        elif isinstance(batch, tuple | list):
            self.call = ModelCall(tuple(batch), {})
        else:
            self.call = ModelCall((batch,), {})

    def __call__(self) -> None:
        """Run a forward and a backward.

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
        if self.before_backward is not None:
            self.before_backward(loss)
        self.in_backward = True
        try:
            loss.backward()
        finally:
            self.in_backward = False
        # The memory of a scalar may be larger: `mse_loss` leaves it in that of all its elements.
        self.output_held = max(bytes_of([loss]) - loss.nbytes, 0)
        if self._given_loss is not None:
            self.output_held += self._output_bytes(out)

    @contextmanager
    def restoring_outside_gradients(self) -> Iterator[None]:
        """Restore, at the end, gradients of leaves outside the model, as a head or the batch."""
        try:
            yield
        finally:
            for leaf, gradient in (self._others or {}).items():
                leaf.grad = gradient
            self._others = None

    def fingerprints(self) -> GradientFingerprints:
        """Run the step from gradients of zero, and return the fingerprints of its gradients.

        The keys are names of the model's parameters, and leaves outside the model themselves.
        Gradients that are freed as they come are fingerprinted before that.
        """
        with torch.no_grad():
            for gradient in self._gradients().values():
                if gradient is not None:
                    gradient.zero_()
        collector = self._collector = FingerprintCollector()
        try:
            self()
        finally:
            self._collector = None
        made = self._gradients()
        for key, gradient in made.items():
            if gradient is not None and key not in collector:
                collector.add(key, gradient)
        found = collector.read()
        return {key: found[key] for key in made if key in found}

    def on_gradient(self, name: str, gradient: Tensor) -> None:
        """Fingerprint a gradient of the model that is complete and about to be freed."""
        if self._collector is not None:
            self._collector.add(name, gradient)

    def _gradients(self) -> dict[Any, Tensor | None]:
        """The current gradients: of the model by name, of leaves outside it by the leaf."""
        own: dict[Any, Tensor | None] = {n: p.grad for n, p in self.model.named_parameters()}
        return own | {leaf: leaf.grad for leaf in self._others or {}}

    def loss(self) -> Tensor:
        """Run the forward, and return the loss."""
        return self._forward()[1]

    def run_forward(self) -> Any:
        """Run the forward without a loss that is given, and return its output."""
        if self.before_each is not None:
            self.before_each()
        return self._call_model() if self.function is None else self.function()

    def _forward(self) -> tuple[Any, Tensor]:
        """Run the forward, and return the model's output and the loss."""
        out = self.run_forward()
        if self._given_loss is not None:
            return out, self._given_loss(out, self._batch_for(self._given_loss))
        loss = find_loss(out)
        if loss is None:
            self.loss_source = "none"
            loss = _sum_of_outputs(out)
        return out, loss

    def _call_model(self) -> Any:
        """Call the model, the first time on copies of the objects in the batch."""
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
        """The batch as a user gave it; of a later call, the batch in the same form."""
        if isinstance(self.batch, ModelCall) and loss.takes_batch:
            return batch_in_form(loss.form, self.model, self.call.args, self.call.kwargs)
        return self.batch

    def _output_bytes(self, out: Any) -> int:
        """Bytes of the model's output, without the batch's and the model's own tensors in it."""
        known = [*self.model.parameters(), *self.model.buffers(), *self.batch_tensors()]
        keys = {storage_key(storage) for tensor in known for storage in storages_of(tensor)}
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return bytes_of(
            leaf
            for leaf in leaves
            if not any(storage_key(storage) in keys for storage in storages_of(leaf))
        )

    def batch_tensors(self) -> list[Tensor]:
        """The tensors of the batch."""
        leaves = tree_leaves((self.call.args, self.call.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def existing_tensors(self) -> list[Tensor]:
        """Tensors that exist before the step runs: the model, the batch, and gradients so far."""
        gradients = [gradient for gradient in self._gradients().values() if gradient is not None]
        return [*self.model.parameters(), *self.model.buffers(), *self.batch_tensors(), *gradients]

    def describe_batch(self) -> str:
        """The batch as text: two batches with the same text have the same shapes."""
        if self.function is not None:
            return A_FUNCTION
        if not isinstance(self.batch, ModelCall):
            return str(describe_tree(self.batch))
        args, kwargs = describe_tree((self.call.args, self.call.kwargs))
        by_position = args[0] if len(args) == 1 else args
        return str(by_position if not kwargs else kwargs if not args else (*args, kwargs))


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves that a backward from the loss gives gradients to."""
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


def describe_leaf(leaf: Any) -> Any:
    """Return a short text for a tensor, the value of a number or a text, else the class's name."""
    if isinstance(leaf, Tensor):
        learns = " that learns" if leaf.requires_grad else ""
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{learns}"
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf).__name__


def describe_tree(tree: Any) -> Any:
    """Return a batch, or a block's arguments, with a text in the place of each tensor.

    A container of torch's that is no list, tuple or dict, as a `PackedSequence`, becomes a tuple of
    its name and its parts: its own class would not take texts for tensors.
    """
    if type(tree) is dict:
        return {key: describe_tree(item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(describe_tree, tree))
    # The first answer is for the tree, the others for its parts. A closure over the tree would hold
    # it, with the graphs behind its tensors, until a garbage collection: flattening leaves a cycle.
    are_leaves = iter([False])
    leaves, spec = tree_flatten(tree, is_leaf=lambda _: next(are_leaves, True))
    if spec.is_leaf():
        return describe_leaf(tree)
    return (type(tree).__name__, *map(describe_tree, leaves))


def _sum_of_outputs(out: Any) -> Tensor:
    """Return the sum of all outputs that require a gradient, which stands for a loss."""
    leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError("The step's result requires no gradient: there is nothing to train")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()
