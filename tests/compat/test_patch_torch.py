"""`rekindle.patch_torch()`: code that nobody can edit runs on our engine, until it is undone."""

import functools
import importlib
import io
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import checkpoint_activation
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

import rekindle
from rekindle.compat import checkpoint as compat
from rekindle.compat import checkpoint_wrapper as compat_wrappers
from rekindle.torch_private import torch_checkpoint
from tests.toys import Block, Mlp, Stack, assert_same_step, same_bits

torch_module = torch.utils.checkpoint
torchs_checkpoint = torch_module.checkpoint
torchs_generator = torch_module._checkpoint_without_reentrant_generator
REPLACED = sorted(
    name
    for name in torch_module.__all__
    if getattr(torch_module, name) is not getattr(compat, name)
)
PATCHED = (torch_module, torch_wrappers, checkpoint_activation, fsdp)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


def attributes() -> dict[tuple[str, str], Any]:
    """Every attribute of the modules that are patched."""
    return {
        (module.__name__, name): value for module in PATCHED for name, value in vars(module).items()
    }


def differing(before: dict[Any, Any]) -> list[Any]:
    after = attributes()
    assert before.keys() == after.keys()
    return [key for key in before if before[key] is not after[key]]


Make = Callable[[str], ModuleType]


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Import source as a module of its own, which no other test sees."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(source: str) -> ModuleType:
        name = f"library_{tmp_path.name}_{len(made)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        del sys.modules[name]


# In place, and undone


def test_inside_the_context_torchs_names_are_ours() -> None:
    with rekindle.patch_torch():
        for name in torch_module.__all__:
            assert getattr(torch_module, name) is getattr(compat, name)


def test_inside_the_context_torchs_private_names_are_ours() -> None:
    with rekindle.patch_torch():
        generator = torch_module._checkpoint_without_reentrant_generator
        assert generator is compat._checkpoint_without_reentrant_generator
        assert torch_module._infer_device_type is compat._infer_device_type


def test_inside_the_context_torchs_wrappers_are_ours() -> None:
    with rekindle.patch_torch():
        for name in compat_wrappers.__all__:
            assert getattr(torch_wrappers, name) is getattr(compat_wrappers, name)


def test_after_the_context_every_attribute_is_as_before() -> None:
    before = attributes()
    with rekindle.patch_torch():
        assert len(differing(before)) >= len(REPLACED)
    assert differing(before) == []


def test_a_call_stays_until_it_is_undone() -> None:
    before = attributes()
    patch = rekindle.patch_torch()
    try:
        assert torch_module.checkpoint is compat.checkpoint
    finally:
        patch.undo()
    assert differing(before) == []


def test_an_exception_inside_undoes_it_too() -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), rekindle.patch_torch():
        raise ZeroDivisionError
    assert differing(before) == []


def test_a_failing_step_inside_undoes_it_too() -> None:
    before = attributes()

    def fails(x: Tensor) -> Tensor:
        if rekindle.is_recomputing():
            raise ZeroDivisionError
        return wave(x)

    def step() -> None:
        with rekindle.patch_torch():
            torch_module.checkpoint(fails, leaf(3), use_reentrant=False).sum().backward()

    with pytest.raises(ZeroDivisionError):
        step()
    assert differing(before) == []


def test_an_inner_patch_undoes_nothing() -> None:
    before = attributes()
    with rekindle.patch_torch():
        with rekindle.patch_torch():
            assert torch_module.checkpoint is compat.checkpoint
        assert torch_module.checkpoint is compat.checkpoint
    assert differing(before) == []


def test_an_inner_patch_inside_one_that_was_called_undoes_nothing() -> None:
    patch = rekindle.patch_torch()
    try:
        with rekindle.patch_torch():
            pass
        assert torch_module.checkpoint is compat.checkpoint
    finally:
        patch.undo()


def test_undoing_a_second_time_does_nothing() -> None:
    patch = rekindle.patch_torch()
    patch.undo()
    with rekindle.patch_torch():
        patch.undo()
        assert torch_module.checkpoint is compat.checkpoint
    assert torch_module.checkpoint is torchs_checkpoint


def test_it_can_be_patched_again() -> None:
    before = attributes()
    for _ in range(3):
        with rekindle.patch_torch(), rekindle.observe() as seen:
            torch_module.checkpoint(wave, leaf(3), use_reentrant=False)
        assert seen.total.forwards == 1
    assert differing(before) == []


def test_what_the_user_put_in_torchs_place_meanwhile_is_not_ours_to_keep() -> None:
    """The last word is the original's: undoing gives back what was there before the patch."""
    with rekindle.patch_torch():
        torch_module.checkpoint = wave
    assert torch_module.checkpoint is torchs_checkpoint


def test_a_region_of_the_patch_is_replayed_after_it() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        with rekindle.patch_torch():
            out = torch_module.checkpoint(wave, x, use_reentrant=False)
        out.sum().backward()
    assert seen.total.replays == 1
    assert same_bits(x.grad, torch.autograd.grad(wave(x).sum(), [x])[0])


def test_a_region_of_torchs_is_replayed_under_the_patch() -> None:
    x = leaf(3)
    out = torchs_checkpoint(wave, x, use_reentrant=False)
    with rekindle.patch_torch():
        out.sum().backward()
    assert same_bits(x.grad, torch.autograd.grad(wave(x).sum(), [x])[0])


# Modules that hold the name

TOOK_IT = """
    from torch.utils.checkpoint import checkpoint, checkpoint as ckpt, CheckpointError
    from torch.utils.checkpoint import set_checkpoint_early_stop

    def run(function, *args, **options):
        return ckpt(function, *args, use_reentrant=False, **options)
"""


def test_a_module_that_took_the_name_before_has_ours_inside(make_module: Make) -> None:
    library = make_module(TOOK_IT)
    with rekindle.patch_torch():
        assert library.checkpoint is compat.checkpoint
        assert library.ckpt is compat.checkpoint
        assert library.CheckpointError is rekindle.CheckpointError


def test_a_module_that_took_the_name_before_has_its_own_back_after(make_module: Make) -> None:
    library = make_module(TOOK_IT)
    before = dict(vars(library))
    with rekindle.patch_torch():
        pass
    assert [name for name in before if vars(library)[name] is not before[name]] == []


def test_a_module_that_takes_the_name_inside_gets_ours(make_module: Make) -> None:
    with rekindle.patch_torch(), rekindle.observe() as seen:
        library = make_module(TOOK_IT)
        library.run(wave, leaf(3)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_a_module_that_takes_the_name_inside_has_torchs_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module(TOOK_IT)
    assert library.checkpoint is torchs_checkpoint
    assert library.ckpt is torchs_checkpoint


def test_a_module_that_takes_the_switch_inside_turns_torchs_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module(TOOK_IT)
    with library.set_checkpoint_early_stop(False):
        assert count_ends(torchs_checkpoint) == 2


def test_a_module_that_takes_the_error_inside_catches_torchs_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module(TOOK_IT)
    flips = iter([True, False])
    out = library.run(lambda x: x.sin() if next(flips) else x[:1].sin(), leaf(3))
    with pytest.raises(library.CheckpointError):
        out.sum().backward()


def test_a_module_that_takes_the_name_inside_an_inner_patch_has_torchs_after(
    make_module: Make,
) -> None:
    with rekindle.patch_torch():
        with rekindle.patch_torch():
            library = make_module(TOOK_IT)
        assert library.checkpoint is compat.checkpoint
    assert library.checkpoint is torchs_checkpoint


def test_a_module_that_uses_rekindle_keeps_ours_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module("from rekindle import CheckpointError, checkpoint")
    assert library.checkpoint is rekindle.checkpoint
    assert library.CheckpointError is rekindle.CheckpointError


def test_a_module_that_uses_rekindles_compat_names_keeps_them_after(make_module: Make) -> None:
    source = "from rekindle.compat.checkpoint import checkpoint"
    library = make_module(source)
    with rekindle.patch_torch():
        pass
    assert library.checkpoint is compat.checkpoint


def test_a_module_that_looks_odd_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contrived: `sys.modules` may hold anything."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "odd_lazy", Lazy("odd_lazy"))
    monkeypatch.setitem(sys.modules, "odd_none", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "odd_object", object())  # type: ignore[arg-type]
    with rekindle.patch_torch():
        assert torch_module.checkpoint is compat.checkpoint
    assert torch_module.checkpoint is torchs_checkpoint


# Code that nobody can edit


@pytest.mark.parametrize(
    "call",
    [
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)",
        "torch.utils.checkpoint.checkpoint_sequential([block, torch.sin], 2, x, False)",
        "torch.utils.checkpoint.CheckpointFunction.apply(block, True, x)",
    ],
)
def test_a_library_runs_on_ours(call: str, make_module: Make) -> None:
    library = make_module(f"""
        import torch.utils.checkpoint

        def run(block, x):
            return {call}
    """)
    block, x = Block(drop=0.2), leaf(2, 8)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        library.run(block, x).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
    assert list(seen.regions) in (["Block"], ["segment 1 of 2"])


def test_a_library_that_leaves_use_reentrant_open_is_reentrant_and_warned() -> None:
    with rekindle.patch_torch(), rekindle.observe() as seen:
        with pytest.warns(UserWarning, match="use_reentrant"):
            out = torch_module.checkpoint(wave, leaf(3))
        assert out.grad_fn.name() == "CheckpointFunctionBackward"
    assert seen.total.forwards == 1


def test_a_librarys_step_is_as_plain() -> None:
    model, x = Stack(3, drop=0.3), leaf(2, 8)

    def library(block: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    with rekindle.patch_torch():
        assert_same_step(lambda: model(x), lambda: model(x, library), [x, *model.parameters()])


def test_a_library_that_catches_torchs_error_catches_ours(make_module: Make) -> None:
    library = make_module("""
        import torch.utils.checkpoint

        def run(function, x):
            out = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
            try:
                out.sum().backward()
            except torch.utils.checkpoint.CheckpointError as error:
                return error
    """)

    def differs(x: Tensor) -> Tensor:
        return x.sin().exp() if rekindle.is_recomputing() else x[:1].sin().exp()

    with rekindle.patch_torch():
        assert isinstance(library.run(differs, leaf(3)), rekindle.CheckpointError)


def test_torchs_selective_contexts_run_under_the_patch() -> None:
    x = leaf(4, 4)
    contexts = functools.partial(
        torch_module.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    )
    with rekindle.patch_torch(), rekindle.observe() as seen:
        torch_module.checkpoint(
            lambda x: (x @ x).sin().exp(), x, use_reentrant=False, context_fn=contexts
        ).sum().backward()
    assert seen.total.ops_replayed == 2
    assert same_bits(x.grad, torch.autograd.grad((x @ x).sin().exp().sum(), [x])[0])


# The switches


def ends(calls: list[str], x: Tensor) -> Tensor:
    """A region that notes its end: a replay that stops early does not come to it."""
    y = x.sin().exp()
    z = y.cos() + 1
    calls.append("end")
    return z


def count_ends(run: Callable[..., Any], **options: Any) -> int:
    calls: list[str] = []
    run(functools.partial(ends, calls), leaf(3), use_reentrant=False, **options).sum().backward()
    return len(calls)


def test_a_replay_stops_early_under_the_patch() -> None:
    with rekindle.patch_torch():
        assert count_ends(torch_module.checkpoint) == 1


def test_early_stop_through_torchs_name_acts_on_ours() -> None:
    with rekindle.patch_torch(), torch_module.set_checkpoint_early_stop(False):
        assert count_ends(rekindle.checkpoint) == 2
        assert count_ends(torch_module.checkpoint) == 2
    assert count_ends(rekindle.checkpoint) == 1


def test_early_stop_through_our_name_acts_on_torchs() -> None:
    assert count_ends(torchs_checkpoint) == 1
    with rekindle.set_checkpoint_early_stop(False):
        assert count_ends(torchs_checkpoint) == 2
    assert count_ends(torchs_checkpoint) == 1


def test_early_stop_through_our_name_acts_on_the_patched() -> None:
    with rekindle.patch_torch(), rekindle.set_checkpoint_early_stop(False):
        assert count_ends(torch_module.checkpoint) == 2


def test_early_stop_set_before_the_patch_acts_on_the_patched() -> None:
    with torch_module.set_checkpoint_early_stop(False), rekindle.patch_torch():
        assert count_ends(torch_module.checkpoint) == 2


def test_early_stop_of_a_module_that_took_it_before_acts_on_ours(make_module: Make) -> None:
    library = make_module(TOOK_IT)
    with rekindle.patch_torch(), library.set_checkpoint_early_stop(False):
        assert count_ends(rekindle.checkpoint) == 2


def test_early_stop_that_is_left_after_the_patch_is_off_again() -> None:
    with rekindle.patch_torch():
        switch = torch_module.set_checkpoint_early_stop(False)
        switch.__enter__()
    switch.__exit__(None, None, None)
    assert count_ends(rekindle.checkpoint) == 1
    assert count_ends(torchs_checkpoint) == 1


def differs_in_replay(x: Tensor) -> Tensor:
    return x.sin().exp() if rekindle.is_recomputing() else x.cos()[:1].exp()


def error_of(run: Callable[..., Any]) -> str:
    out = run(differs_in_replay, leaf(3), use_reentrant=False)
    with pytest.raises(rekindle.CheckpointError) as caught:
        out.sum().backward()
    return str(caught.value)


def test_debug_through_torchs_name_acts_on_ours() -> None:
    with rekindle.patch_torch():
        quiet = error_of(torch_module.checkpoint)
        with torch_module.set_checkpoint_debug_enabled(True):
            loud, loud_too = error_of(torch_module.checkpoint), error_of(rekindle.checkpoint)
    assert "aten.sin" not in quiet
    assert "aten.sin" in loud
    assert "aten.sin" in loud_too


def test_debug_through_our_name_acts_on_torchs() -> None:
    """Torch refuses a context_fn in debug, so its refusal shows that debug is on."""
    with (
        rekindle.set_checkpoint_debug_enabled(True),
        pytest.raises(ValueError, match="incompatible with non-default context_fn"),
    ):
        torchs_checkpoint(wave, leaf(3), use_reentrant=False, context_fn=lambda: (None, None))


def test_debug_set_before_the_patch_acts_on_the_patched() -> None:
    with torch_module.set_checkpoint_debug_enabled(True), rekindle.patch_torch():
        assert "aten.sin" in error_of(torch_module.checkpoint)


# Torch's own users of its checkpoint


def composed(depth: int = 2) -> Stack:
    model = Stack(depth, drop=0.2)
    for block in model.blocks:
        composable_checkpoint(block)
    return model


def test_the_composable_form_runs_on_ours() -> None:
    model, x = composed(), leaf(2, 8)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        model(x).sum().backward()
    assert {name: (c.forwards, c.replays) for name, c in seen.regions.items()} == {"Block": (2, 2)}


def test_the_composable_form_without_the_patch_runs_on_torchs() -> None:
    with rekindle.observe() as seen:
        composed()(leaf(2, 8)).sum().backward()
    assert seen.total.forwards == 0


def test_a_step_of_the_composable_form_is_as_plain() -> None:
    plain, model, x = Stack(2, drop=0.2), composed(), leaf(2, 8)
    model.load_state_dict(plain.state_dict())
    with rekindle.patch_torch():
        for run in (plain, model):
            torch.manual_seed(3)
            run(x).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(a.grad, b.grad)


def test_the_composable_form_goes_backward_twice() -> None:
    """Each replay enters torch's context anew."""
    model, x = composed(), leaf(2, 8)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        loss = model(x).sum()
        first = torch.autograd.grad(loss, [x], retain_graph=True)
        second = torch.autograd.grad(loss, [x])
    assert seen.total.replays == 4
    assert all(map(same_bits, first, second))


def test_the_composable_form_under_no_grad_makes_no_region() -> None:
    with rekindle.patch_torch(), rekindle.observe() as seen, torch.no_grad():
        composed()(leaf(2, 8))
    assert seen.total.forwards == 0


def test_the_composable_form_recovers_from_an_error_in_forward() -> None:
    model, x = composed(1), leaf(2, 8)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        with pytest.raises(RuntimeError, match="shape"):
            model(leaf(2, 7))
        model(x).sum().backward()
    assert seen.total.replays == 1
    assert x.grad is not None


def test_the_composable_form_runs_the_users_contexts() -> None:
    logged: list[str] = []

    def contexts() -> tuple[Any, Any]:
        return _Noted(logged, "forward"), _Noted(logged, "replay")

    mlp, x = Mlp(), leaf(2, 8)
    composable_checkpoint(mlp, context_fn=contexts)
    with rekindle.patch_torch():
        mlp(x).sum().backward()
    assert logged == ["forward", "replay"]


class _Noted:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def __enter__(self) -> None:
        self.log.append(self.name)

    def __exit__(self, *error: object) -> None:
        pass


def wrapped(impl: Any, **options: Any) -> Stack:
    model = Stack(2, drop=0.2)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch_wrappers.checkpoint_wrapper(block, impl, **options)
    return model


@pytest.mark.parametrize("impl", list(torch_wrappers.CheckpointImpl), ids=lambda impl: impl.name)
def test_torchs_wrapper_runs_on_ours(impl: Any) -> None:
    with rekindle.patch_torch(), rekindle.observe() as seen:
        wrapped(impl)(leaf(2, 8)).sum().backward()
    assert {name: (c.forwards, c.replays) for name, c in seen.regions.items()} == {"Block": (2, 2)}


@pytest.mark.parametrize("impl", list(torch_wrappers.CheckpointImpl), ids=lambda impl: impl.name)
def test_a_step_of_torchs_wrapper_is_as_plain(impl: Any) -> None:
    plain, x = Stack(2, drop=0.2), leaf(2, 8)
    with rekindle.patch_torch():
        model = wrapped(impl)
        model.load_state_dict(plain.state_dict())
        for run in (plain, model):
            torch.manual_seed(3)
            run(x).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(a.grad, b.grad)


def test_torchs_wrapper_passes_keyword_arguments_and_options() -> None:
    with rekindle.patch_torch():
        wrapper = torch_wrappers.checkpoint_wrapper(Mlp(), early_stop=False)
        with rekindle.observe() as seen:
            wrapper(x=leaf(2, 8)).sum().backward()
    assert seen.total.ops_replayed == 5


def test_a_wrapper_made_under_the_patch_is_ours_and_stays_so() -> None:
    with rekindle.patch_torch():
        model = wrapped(torch_wrappers.CheckpointImpl.NO_REENTRANT)
    with rekindle.observe() as seen:
        model(leaf(2, 8)).sum().backward()
    assert type(model.blocks[0]) is rekindle.CheckpointWrapper
    assert (seen.total.forwards, seen.total.replays) == (2, 2)


def test_torchs_offload_wrapper_is_ours() -> None:
    """Field note 20: torch's sends parameters too, and waits."""
    with rekindle.patch_torch():
        assert type(torch_wrappers.offload_wrapper(Mlp())) is rekindle.OffloadWrapper


def test_a_wrapper_made_before_the_patch_is_known_as_one_under_it() -> None:
    before = wrapped(torch_wrappers.CheckpointImpl.NO_REENTRANT).blocks[0]
    with rekindle.patch_torch():
        assert isinstance(before, torch_wrappers.CheckpointWrapper)
        assert isinstance(before, fsdp.ActivationWrapper)


def test_a_wrapper_made_under_the_patch_is_known_as_one_after_it() -> None:
    with rekindle.patch_torch():
        wrapper = torch_wrappers.checkpoint_wrapper(Mlp())
    assert isinstance(wrapper, torch_wrappers.CheckpointWrapper)
    assert isinstance(wrapper, fsdp.ActivationWrapper)


@pytest.mark.parametrize(
    "wrap", [torch_wrappers.checkpoint_wrapper, torch_wrappers.offload_wrapper]
)
def test_a_wrapper_that_torch_saved_is_loaded_as_ours(wrap: Any) -> None:
    block, file = Block(drop=0.2), io.BytesIO()
    torch.save(wrap(block), file)
    file.seek(0)
    with rekindle.patch_torch():
        wrapper = torch.load(file, weights_only=False)
    assert type(wrapper).__module__ == "rekindle.modules.wrappers"
    assert list(wrapper.state_dict()) == list(block.state_dict())
    wrapper.load_state_dict(block.state_dict())
    wrapper._checkpoint_wrapped_module = block
    x = leaf(2, 8)
    assert_same_step(lambda: block(x), lambda: wrapper(x), [x, *block.parameters()])


def test_a_checkpoint_wrapper_that_torch_saved_is_replayed_by_ours() -> None:
    file = io.BytesIO()
    torch.save(torch_wrappers.checkpoint_wrapper(Block()), file)
    file.seek(0)
    with rekindle.patch_torch():
        wrapper = torch.load(file, weights_only=False)
    with rekindle.observe() as seen:
        wrapper(leaf(2, 8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_a_module_that_took_the_wrappers_has_ours_inside_and_torchs_after(
    make_module: Make,
) -> None:
    source = """
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            CheckpointImpl, CheckpointWrapper, apply_activation_checkpointing, checkpoint_wrapper,
        )
    """
    names = "CheckpointWrapper", "apply_activation_checkpointing", "checkpoint_wrapper"
    before = make_module(source)
    with rekindle.patch_torch():
        meanwhile = make_module(source)
        for name in names:
            assert getattr(before, name) is getattr(meanwhile, name) is getattr(rekindle, name)
    for name in names:
        torchs = getattr(torch_wrappers, name)
        assert getattr(before, name) is getattr(meanwhile, name) is torchs


def test_torchs_wrapper_compiles_under_the_patch() -> None:
    torch.compiler.reset()
    block, x = Block(), leaf(2, 8)
    with rekindle.patch_torch():
        wrapper = torch_wrappers.checkpoint_wrapper(block)
        compiled = torch.compile(wrapper, backend="aot_eager", fullgraph=True)
        assert_same_step(lambda: block(x), lambda: compiled(x), [x, *block.parameters()])
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_a_policy_compiles_under_the_patch(backend: str) -> None:
    """As transformers holds it: in a partial of torch's function."""
    torch.compiler.reset()
    block, x = Block(drop=0.5), leaf(2, 8)
    with rekindle.patch_torch():
        checkpoint = functools.partial(
            torch.utils.checkpoint.checkpoint,
            use_reentrant=False,
            context_fn=rekindle.policies.keep_matmuls,
        )
        compiled = torch.compile(lambda x: checkpoint(block, x), backend=backend, fullgraph=True)
        assert_same_step(lambda: block(x), lambda: compiled(x), [x, *block.parameters()])
    assert_same_step(lambda: block(x), lambda: compiled(x), [x, *block.parameters()])
    torch.compiler.reset()


def test_dynamo_knows_torchs_function_again_after_the_patch() -> None:
    from torch._dynamo import utils  # noqa: PLC0415 (slow to import)
    from torch._dynamo.variables import builder  # noqa: PLC0415

    before = utils.is_utils_checkpoint
    with rekindle.patch_torch():
        for module in (utils, builder):
            assert module.is_utils_checkpoint(torch_checkpoint.torch_checkpoint)
            assert not module.is_utils_checkpoint(torch.utils.checkpoint.checkpoint)
    assert utils.is_utils_checkpoint is builder.is_utils_checkpoint is before


def test_torchs_wrapper_made_before_the_patch_runs_on_ours() -> None:
    """It holds torch's function, which looks up the names that the patch replaced."""
    model = wrapped(torch_wrappers.CheckpointImpl.NO_REENTRANT)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        model(leaf(2, 8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (2, 2)


def test_torchs_apply_activation_checkpointing_runs_on_ours() -> None:
    model = Stack(3)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        torch_wrappers.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, Mlp)
        )
        model(leaf(2, 8)).sum().backward()
    assert {name: (c.forwards, c.replays) for name, c in seen.regions.items()} == {"Mlp": (3, 3)}


def test_the_generator_that_torchs_composable_form_took_is_back_after() -> None:
    with rekindle.patch_torch():
        pass
    assert checkpoint_activation._checkpoint_without_reentrant_generator is torchs_generator
