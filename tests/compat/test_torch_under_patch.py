"""Torch's own users of its checkpoint, under `rekindle.patch_torch()`."""

import functools
import io
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import checkpoint_activation
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

import rekindle
from rekindle.torch_private import torch_checkpoint
from tests.compat.patching import Make, torchs_generator
from tests.toys import Block, Mlp, Stack, assert_same_step, leaf, same_bits


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
