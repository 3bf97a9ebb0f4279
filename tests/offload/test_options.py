"""How `rekindle.offload` is called: arguments, decorator, copies of it."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.offloading import STEPS, chain, leaf, moved, only_offloader, spilling
from tests.toys import Stack, assert_same_step, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tier": "tape"}, ValueError, 'tier should be "host" or "disk"'),
        ({"quota": 1.5}, ValueError, "from 0.0 to 1.0, but got 1.5"),
        ({"quota": -0.5}, ValueError, "from 0.0 to 1.0"),
        ({"quota": float("nan")}, ValueError, "from 0.0 to 1.0"),
        ({"quota": -1}, ValueError, "quota should not be negative"),
        ({"quota": "much"}, ValueError, 'quota should be "auto", like'),
        ({"quota": "150%"}, ValueError, "from 0.0 to 1.0"),
        ({"quota": "half%"}, ValueError, "quota as a share should be like"),
        ({"quota": True}, TypeError, "quota should be a whole number of bytes"),
        ({"quota": None}, TypeError, "quota should be a whole number of bytes"),
        ({"min_bytes": 1.0}, TypeError, "min_bytes should be a whole number"),
        ({"min_bytes": -1}, ValueError, "min_bytes should not be negative"),
        ({"min_bytes": "x"}, ValueError, "min_bytes should be like"),
        ({"max_host_bytes": -1}, ValueError, "max_host_bytes should not be negative"),
        ({"max_host_bytes": "1 parsec"}, ValueError, "max_host_bytes should be like"),
        ({"on_full": "cry"}, ValueError, 'on_full should be "keep" or "raise"'),
        ({"directory": "/no/such/folder"}, ValueError, "an existing folder"),
        ({"tier": "host", "directory": "/tmp"}, ValueError, 'directory is for tier="disk"'),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rekindle.offload(**({"tier": "disk"} | options))


def test_derive_takes_nothing_but_a_bool() -> None:
    """Any text is true: derive="no" would do the contrary of what it says."""
    with pytest.raises(TypeError, match="derive"):
        spilling(derive="no")


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        rekindle.offload("disk")  # type: ignore[misc]


def test_it_prints_as_it_was_made() -> None:
    assert repr(spilling(min_bytes="1KiB")).startswith(
        "rekindle.offload(tier='disk', quota=1.0, min_bytes=1024"
    )


# Decorator


def test_a_decorated_function_is_offloaded() -> None:
    x = leaf(16)
    decorated = spilling()(chain)
    with rekindle.observe() as seen:
        decorated(x).sum().backward()
    assert (seen.spill.tensors_out, seen.spill.tensors_in) == (8, 8)


def test_a_decorated_function_keeps_its_name_and_takes_its_arguments() -> None:
    decorated = spilling()(chain)
    assert decorated.__name__ == "chain"
    x = leaf(16)
    assert same_bits(decorated(x, length=3), chain(x, length=3))


def test_a_decorated_method_has_plain_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(depth=4)

        def plain(self, x: Tensor) -> Tensor:
            return self.stack(x)

        forward = spilling()(plain)

    model, x = Model(), leaf(4, 8)
    for _ in range(STEPS):
        assert_same_step(lambda: model.plain(x), lambda: model(x), [x, *model.parameters()])


def test_a_decorated_function_may_call_itself() -> None:
    @spilling()
    def deep(x: Tensor, depth: int) -> Tensor:
        return deep(x.sin(), depth - 1) if depth else x.cos()

    x = leaf(16)
    expected = chain(x, 6).cos()
    for _ in range(STEPS):
        assert_same_step(lambda: chain(x, 6).cos(), lambda: deep(x, 6), [x])
    assert same_bits(expected, deep(x, 6))


async def coroutine() -> None: ...


def generator() -> Iterable[int]:
    yield 1


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize("function", [coroutine, generator, async_generator])
def test_a_function_that_does_not_run_when_called_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="does not run when it is called"):
        spilling()(function)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="decorates a function, not int"):
        spilling()(3)  # type: ignore[type-var]


def test_a_model_that_holds_its_offload_can_be_copied() -> None:
    model = nn.Linear(2, 2)
    model.offload = spilling()  # type: ignore[assignment]
    assert copy.deepcopy(model).offload.strategy == spilling().strategy  # type: ignore[union-attr]


def test_trim_gives_the_disk_back() -> None:
    x, offload = leaf(16), spilling()
    with offload:
        loss = chain(x).sum()
    loss.backward()
    offload.trim()
    assert only_offloader().tier.pool_bytes == 0
    assert moved(lambda: chain(x)) == [(8, 8 * 64)] * STEPS


def test_nothing_is_moved_after_the_with() -> None:
    x = leaf(16)
    with rekindle.observe() as seen:
        with spilling():
            h = x.sin()
        chain(h).sum().backward()
    assert seen.spill.tensors_out == 0


def test_a_module_is_no_function_to_decorate() -> None:
    with pytest.raises(TypeError, match="not Linear"):
        rekindle.offload()(torch.nn.Linear(2, 2))


def test_the_repr_is_the_call() -> None:
    assert repr(rekindle.offload(quota=0.5)) == (
        "rekindle.offload(tier='host', quota=0.5, min_bytes=1048576, max_host_bytes=None, "
        "directory=None, on_full='keep', derive=True)"
    )
    assert "quota='auto'" in repr(rekindle.offload())
