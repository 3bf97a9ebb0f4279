"""Private names of tensors, modes and ops do what they say."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.torch_private.autocast import any_autocast, autocast_level, set_autocast_level
from rekindle.torch_private.dispatch_modes import (
    TorchDispatchMode,
    below_modes,
    dispatch_modes,
    dispatch_state,
    is_traced,
    past_modes,
    reads_metadata,
    set_dispatch_state,
    unseen,
)
from rekindle.torch_private.dynamo_frames import is_compiled
from rekindle.torch_private.fx_nodes import node_of, traced_nodes
from rekindle.torch_private.kernel_switches import PRODUCT_SWITCHES
from rekindle.torch_private.module_calls import (
    MODULE_CALL,
    MODULE_CALL_WITH_HOOKS,
    forward_hooks,
    has_always_called_hooks,
)
from rekindle.torch_private.op_types import (
    call_of,
    overload_name,
    packet_name,
    packet_short_name,
    schema_of,
)
from rekindle.torch_private.storages import storage_from_reference, storage_key, storage_users
from rekindle.torch_private.tensor_identity import WeakTensor, generator_key, tensor_key
from rekindle.torch_private.torch_function import entered_function_modes, set_function_modes
from rekindle.torch_private.version_counters import (
    VersionMark,
    detached,
    set_version,
    version_alias,
    version_of,
)

aten = torch.ops.aten


class Seeing(TorchDispatchMode):
    """Notes the ops that it sees, and runs a function after each."""

    def __init__(self, after: Any = lambda _: None) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self.after = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append(func)
        self.after(out)
        return out


def test_ops_run_past_a_mode_that_is_entered() -> None:
    x = torch.ones(2)
    with Seeing() as mode:
        past_modes(x.sin)
        with below_modes():
            x.cos()
        unseen(torch.exp, x)
        assert dispatch_modes() == 1
    assert mode.ops == []


def test_modes_see_what_is_done_with_a_tensor_of_a_subclass() -> None:
    with Seeing() as mode:
        unseen(torch.exp, torch.nn.Parameter(torch.ones(2)))
    assert aten.exp.default in mode.ops


def test_an_op_is_called_past_its_python() -> None:
    assert call_of(aten.add.Tensor)(torch.ones(()), 1).item() == 2
    assert call_of(torch.ops.higher_order.cond) is torch.ops.higher_order.cond


def test_modes_are_left_and_entered_again() -> None:
    outside = dispatch_state()
    with Seeing() as mode:
        inside = dispatch_state()
        set_dispatch_state(outside)
        torch.ones(2)
        set_dispatch_state(inside)
        torch.zeros(2)
    assert mode.ops == [aten.zeros.default]
    with torch.device("meta"):
        (device,) = entered_function_modes()
        set_function_modes([])
        assert torch.ones(2).device.type == "cpu"
        set_function_modes([device])
        assert torch.ones(2).device.type == "meta"


def test_a_trace_knows_its_nodes() -> None:
    seen = []

    def traced(x: Tensor) -> Tensor:
        y = x.sin()
        seen.append((is_traced(), node_of(y) is next(iter(traced_nodes()))))
        return y

    make_fx(traced)(torch.ones(2))
    assert seen == [(True, True)]
    assert not is_traced()
    assert list(traced_nodes()) == []


def test_ops_that_ask_for_metadata_are_told_from_others() -> None:
    assert reads_metadata(aten.sym_size.int)
    assert not reads_metadata(aten.sin.default)
    assert not reads_metadata(aten.item.default)


def test_an_alias_shares_its_version_counter_also_inside_a_mode() -> None:
    aliases: list[tuple[Tensor, Tensor]] = []
    with Seeing(lambda out: aliases.append((out, out.view_as(out)))):
        made = torch.ones(2).clone()
    made.mul_(2)
    assert version_of(aliases[-1][1]) == 0, "as torch has it"
    with Seeing(lambda out: aliases.append((out, detached(out)))):
        made = torch.ones(2).clone()
    made.mul_(2)
    assert version_of(aliases[-1][1]) == version_of(made) == 1


def test_a_version_counter_can_be_held_without_data_and_be_set() -> None:
    x = torch.ones(2)
    counter, mark = version_alias(x), VersionMark(x)
    x.add_(1)
    assert (version_of(counter), counter.numel(), mark.is_of(x)) == (1, 0, False)
    set_version(x, 0)
    assert (version_of(x), mark.is_of(x.view(2)), mark.is_of(x.clone())) == (0, True, False)
    with torch.inference_mode():
        assert version_of(torch.ones(2)) == -1


def test_tensors_generators_and_storages_have_numbers_of_their_own() -> None:
    x = torch.ones(2)
    weak = WeakTensor(x)
    assert tensor_key(x) != tensor_key(x.view(2))
    assert storage_key(x.untyped_storage()) == storage_key(x.view(2).untyped_storage())
    assert generator_key(torch.default_generator) != generator_key(torch.Generator())
    del weak


def test_a_storage_is_found_again_while_it_is_held() -> None:
    x = torch.ones(2)
    reference = StorageWeakRef(x.untyped_storage())
    users = storage_users(x.untyped_storage())
    view = x.view(2)
    assert storage_users(x.untyped_storage()) == users + 1
    assert storage_from_reference(reference) is not None
    del x, view
    assert storage_from_reference(reference) is None


def test_ops_are_named_so_that_they_are_found_again() -> None:
    assert overload_name(aten.add.Tensor) == "aten::add.Tensor"
    assert overload_name(aten.mm.default) == "aten::mm.default"
    assert packet_name(aten.add) == "aten::add"
    assert packet_short_name(aten.add.Tensor) == "add"
    assert schema_of(aten.add_.Tensor).is_mutable
    assert schema_of(torch.ops.higher_order.cond) is None


def test_autocast_is_counted() -> None:
    assert (any_autocast(), autocast_level()) == (False, 0)
    with torch.autocast("cpu"):
        assert (any_autocast(), autocast_level()) == (True, 1)
        set_autocast_level(2)
        assert autocast_level() == 2
        set_autocast_level(1)
    assert autocast_level() == 0


def test_switches_are_read_and_set() -> None:
    for read, change in PRODUCT_SWITCHES:
        before = read()
        change(not before)
        assert read() is not before
        change(before)
    assert PRODUCT_SWITCHES


def test_a_module_that_runs_is_found_on_the_stack() -> None:
    codes: list[Any] = []

    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            frame = sys._getframe()
            while frame is not None:
                codes.append(frame.f_code)
                frame = frame.f_back  # type: ignore[assignment]
            return x

    module = Looking()
    module(torch.ones(2))
    assert MODULE_CALL in codes
    assert MODULE_CALL_WITH_HOOKS not in codes
    module.register_forward_hook(lambda *_: None, always_call=True)
    module(torch.ones(2))
    assert MODULE_CALL_WITH_HOOKS in codes
    assert has_always_called_hooks(module)
    assert sum(map(len, forward_hooks(module))) == 2, "the hook, and that it is always called"


@pytest.mark.parametrize("how", ["whole", "in place", "forward"])
def test_compiled_modules_are_told_from_others(how: str) -> None:
    module: nn.Module = nn.Linear(2, 2)
    assert not is_compiled(module)
    if how == "whole":
        module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    elif how == "in place":
        module.compile(backend="eager")
    else:
        module.forward = torch.compile(module.forward, backend="eager")
    assert is_compiled(module)
