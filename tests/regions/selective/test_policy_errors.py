"""Errors of policies: bad input, answers that are no decision, policies that raise."""

import functools
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle.policies import at, every, first, keep, named, of, offload, spill
from rekindle.regions.selective.recorder import is_recording
from rekindle.torch_private.dispatch_modes import dispatch_modes
from rekindle.torch_private.saved_tensor_hooks import top_hooks
from tests.regions.selective.toy_regions import Cube, product, replayed, waves
from tests.toys import leaf

aten = torch.ops.aten


class NoCode(torch.autograd.Function):
    """A forward that is no plain function."""

    forward = staticmethod(functools.partial(lambda by, ctx, x: x * by, 2.0))


BAD: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "torch's function": (lambda: keep(torch.mm), TypeError, r"torch\.ops\.aten\.mm\?"),
    "apply": (lambda: keep(Cube.apply), TypeError, "autograd.Function"),
    "module class": (lambda: keep(nn.Linear), TypeError, "Linear"),
    "number": (lambda: keep(3), TypeError, "got 3"),
    "none": (lambda: spill(None), TypeError, "got None"),
    "dict": (lambda: keep({aten.mm: True}), TypeError, "dict"),
    "list in list": (lambda: offload([[aten.mm]]), TypeError, "list"),
    "no namespace": (lambda: keep("mm"), ValueError, "'aten::mm'"),
    "no such op": (lambda: keep("aten::nope"), ValueError, "'aten::nope'"),
    "no such overload": (lambda: keep("aten::mm.nope"), ValueError, "'aten::mm.nope'"),
    "no such namespace": (lambda: keep("nope::mm"), ValueError, "'nope::mm'"),
    "attribute, no op": (lambda: keep("aten::mm.overloads"), ValueError, "'aten::mm.overloads'"),
    "attribute, no packet": (lambda: keep("aten::name"), ValueError, "'aten::name'"),
    "empty name": (lambda: keep(""), ValueError, "names are like"),
    "pattern": (lambda: at("", keep()), ValueError, "layers"),
    "pattern with a hole": (lambda: at("a..b", keep()), ValueError, r"a\.\.b"),
    "pattern of another type": (lambda: at(3, keep()), (TypeError, ValueError), "3"),
    "decision for a module": (lambda: at("mlp", "kept"), ValueError, "'kept'"),
    "no policy for a module": (lambda: at("mlp", None), TypeError, "NoneType"),
    "no names": (named, ValueError, "names"),
    "names in a list": (lambda: named(["a", "b"]), ValueError, "names"),
    "decision for a name": (lambda: named("a", fate="save"), ValueError, "'save'"),
    "zero": (lambda: first(0, keep()), ValueError, "0"),
    "half": (lambda: every(1.5, keep()), ValueError, r"1\.5"),
    "true": (lambda: first(True, keep()), ValueError, "True"),
    "swapped": (lambda: first(keep(), 2), ValueError, "keep"),
    "word for a policy": (lambda: every(2, "keep"), TypeError, "str"),
    "joined with a number": (lambda: keep() | 3, TypeError, "int"),
    "number joined": (lambda: 3 | keep(), TypeError, "int"),
    "joined with an op": (lambda: keep() | aten.mm, TypeError, "mm"),
    "joined with a function class": (lambda: keep() | Cube, TypeError, "Cube"),
    "policy of an op": (lambda: of(aten.mm.default), TypeError, "mm"),
    "policy of a name": (lambda: of("aten::mm"), TypeError, "str"),
    "contexts of an op": (
        lambda: rekindle.create_selective_checkpoint_contexts(aten.mm),
        TypeError,
        "mm",
    ),
    "contexts of a torch function": (
        lambda: rekindle.create_selective_checkpoint_contexts([torch.mm]),
        TypeError,
        r"torch\.ops\.aten\.mm\?",
    ),
    "contexts of nothing": (
        lambda: rekindle.create_selective_checkpoint_contexts(None),
        TypeError,
        "NoneType",
    ),
    "policy called with one argument": (lambda: keep()(aten.mm), TypeError, "op"),
    "list for context_fn": (
        lambda: rekindle.checkpoint(product, leaf(3, 3), context_fn=[aten.mm]),
        TypeError,
        "context_fn",
    ),
    "keep for context_fn": (
        lambda: rekindle.checkpoint(product, leaf(3, 3), context_fn=keep),
        TypeError,
        "context_fn",
    ),
    "name of a number": (lambda: rekindle.name(3, "three"), TypeError, "int"),
    "number for a name": (lambda: rekindle.name(leaf(3), 3), TypeError, "3"),
    "empty name for a tensor": (lambda: rekindle.name(leaf(3), ""), TypeError, "name"),
}


@pytest.mark.parametrize(("make", "error", "text"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_where_it_is_given(
    make: Callable[[], Any], error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


def test_an_autograd_function_whose_forward_is_an_object_can_be_named_or_is_refused() -> None:
    with suppress(TypeError):
        assert repr(keep(NoCode)) == "keep(NoCode)"


TOLD = (TypeError, ValueError, rekindle.RekindleError)


@pytest.mark.parametrize("answer", [1, 0, 2.0, "kept", "", [], torch.tensor(True)], ids=repr)
def test_an_answer_that_is_no_decision_is_told(answer: Any) -> None:
    policy = of(lambda *args, **kwargs: answer)
    with pytest.raises(TOLD, match=r"keep.*returned"):
        rekindle.checkpoint(waves, leaf(3), context_fn=policy)


@pytest.mark.parametrize("region", [product, lambda x: x * 2, lambda x: 1 - x])
def test_an_answer_that_is_no_decision_is_told_from_an_operator_too(region: Any) -> None:
    """Torch turns a `TypeError` inside an operator into "unsupported operand type(s)"."""
    with pytest.raises(TOLD, match=r"keep.*returned"):
        rekindle.checkpoint(region, leaf(3, 3), context_fn=of(lambda *args, **kwargs: "kept"))


def test_a_policy_function_that_takes_too_few_arguments_is_told() -> None:
    def policy(ctx: Any, op: Any) -> bool:
        return True

    with pytest.raises(TOLD, match="policy"):
        rekindle.checkpoint(product, leaf(3, 3), context_fn=of(policy))


def test_a_policy_that_raises_leaves_nothing_changed() -> None:
    def policy(ctx: Any, op: Any, *args: Any) -> bool:
        raise ZeroDivisionError

    def nested(x: Tensor) -> Tensor:
        return rekindle.checkpoint(product, x, context_fn=of(policy))

    for region, outer in [(product, of(policy)), (nested, keep())]:
        with pytest.raises(ZeroDivisionError):
            rekindle.checkpoint(region, leaf(3, 3), context_fn=outer)
        assert not is_recording()
        assert dispatch_modes() == 0
        assert top_hooks(False) is None
    assert replayed(product, leaf(3, 3), keep(aten.mm)) == 2


def test_a_policy_function_is_let_go_with_its_region() -> None:
    """Trainers make a new one for every call of a region, and it may see the whole model."""
    x, seen = leaf(3, 3), []

    def step() -> None:
        def policy(ctx: Any, op: Any, *args: Any) -> bool:
            return False

        seen.append(ref(policy))
        rekindle.checkpoint(product, x, context_fn=of(policy)).sum().backward()

    step()
    gc.collect()
    assert seen[0]() is None


def test_a_policy_function_may_be_an_object_that_cannot_be_hashed() -> None:
    class Mine:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, ctx: Any, op: Any, *args: Any) -> bool:
            return op is aten.mm.default

    x = leaf(3, 3)
    assert replayed(product, x, of(Mine())) == 2
    assert replayed(product, x, first(1, Mine())) == 2
