"""The ways to call backward on a program. To add one, add a line to `BACKWARDS`."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

import rekindle
from tests.programs.meanwhile import MEANWHILE
from tests.programs.training import Training, loss_of


def _forward(t: Training) -> Tensor:
    loss = loss_of(t.forward())
    MEANWHILE[t.program.meanwhile](t)
    return loss


def _backward(t: Training) -> None:
    _forward(t).backward()


def _grad(t: Training) -> None:
    grads = torch.autograd.grad(_forward(t), list(t.leaves.values()), allow_unused=True)
    t.note_all(zip(t.leaves, grads, strict=True), "grad of")


def _chosen_inputs(t: Training) -> None:
    _forward(t).backward(inputs=list(t.inputs.values())[:1])


def _retain_twice(t: Training) -> None:
    loss = _forward(t)
    loss.backward(retain_graph=True)
    t.note_all(((name, leaf.grad) for name, leaf in t.leaves.items()), "first grad of")
    loss.backward()


def _double(t: Training) -> None:
    grads = torch.autograd.grad(
        _forward(t), list(t.leaves.values()), create_graph=True, allow_unused=True
    )
    t.note_all(zip(t.leaves, grads, strict=True), "grad of")
    loss_of([g * g for g in grads if g is not None]).backward()


def _two_losses(t: Training) -> None:
    outs = t.forward()
    MEANWHILE[t.program.meanwhile](t)
    wanting = [out for out in outs if out.requires_grad]
    loss_of(wanting[:1]).backward(retain_graph=True)
    loss_of([out * 2 for out in wanting]).backward()


def _each_output(t: Training) -> None:
    outs = [out for out in t.forward() if out.requires_grad]
    MEANWHILE[t.program.meanwhile](t)
    torch.autograd.backward(outs, [torch.full_like(out, i + 1) for i, out in enumerate(outs)])


def _in_autocast(t: Training) -> None:
    loss = _forward(t)
    with torch.autocast(t.machine.device.type, torch.bfloat16):
        loss.backward()


def _in_a_thread(t: Training) -> None:
    loss, errors = _forward(t), []

    def work() -> None:
        try:
            loss.backward()
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


def _two_steps(t: Training) -> None:
    _steps(t, 2)


def _five_steps(t: Training) -> None:
    """Offload learns in the first steps, and does as it learnt in the others."""
    _steps(t, 5)


def _steps(t: Training, count: int) -> None:
    optimizer = torch.optim.SGD(t.leaves.values(), lr=0.1, momentum=0.9)
    for step in range(1, count + 1):
        optimizer.zero_grad()
        _forward(t).backward()
        t.note_all(((name, leaf.grad) for name, leaf in t.leaves.items()), f"step {step} grad of")
        optimizer.step()
    t.note_all(t.leaves.items(), "trained")


def _two_forwards_first(t: Training) -> None:
    first, second = _forward(t), _forward(t)
    first.backward()
    second.backward()


def _microbatches(t: Training) -> None:
    """Gradients add up; the inputs are others each time, and the graph before is gone."""
    for scale in (1.0, 0.5):
        with torch.no_grad():
            for leaf in t.inputs.values():
                leaf.mul_(scale)
        _forward(t).backward()


def _exec_group(t: Training) -> None:
    loss = _forward(t)
    inputs = [leaf for leaf in t.inputs.values() if leaf.requires_grad]
    others = [leaf for leaf in t.leaves.values() if not any(leaf is x for x in inputs)]
    with rekindle.GraphExecGroup():
        for leaves in (inputs, others):
            if leaves:
                grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
                t.note_all(enumerate(grads), "grad of")
    loss.backward()


def _exec_group_of_losses(t: Training) -> None:
    outs = [out for out in t.forward() if out.requires_grad]
    MEANWHILE[t.program.meanwhile](t)
    with rekindle.GraphExecGroup():
        for out in outs:
            loss_of([out]).backward(retain_graph=out is not outs[-1])


BACKWARDS: dict[str, Callable[[Training], None]] = {
    "backward()": _backward,
    "autograd.grad(inputs and parameters)": _grad,
    "backward(inputs=...)": _chosen_inputs,
    "backward(retain_graph=True), and again": _retain_twice,
    "autograd.grad(create_graph=True), and backward() of that": _double,
    "two losses, one after the other": _two_losses,
    "autograd.backward() of each output": _each_output,
    "backward() in autocast": _in_autocast,
    "backward() in another thread": _in_a_thread,
    "two steps of SGD": _two_steps,
    "five steps of SGD": _five_steps,
    "two forwards, then their backwards": _two_forwards_first,
    "microbatches, whose gradients add up": _microbatches,
    "grads of inputs, then of parameters, in one exec group": _exec_group,
    "losses in one exec group": _exec_group_of_losses,
}
