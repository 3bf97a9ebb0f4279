"""Models, transforms, modes and optimizers of torch and transformers are plain under offload."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.offload.as_plain import assert_plain_gradients, padded, plain_and_offloaded
from tests.offloading import STEPS, leaf, spilling
from tests.toys import Block, Mlp, Stack, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def test_a_tiny_llama_is_plain() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(50, (2, 12))
    assert_plain_gradients(lambda: model(input_ids=ids, labels=ids).loss, list(model.parameters()))


def test_a_tiny_gpt2_with_dropout_is_plain() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=4, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(50, (2, 12))
    assert_plain_gradients(lambda: model(input_ids=ids, labels=ids).loss, list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_plain(dtype: torch.dtype) -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x)

    assert_plain_gradients(run, [x, *model.parameters()])


def test_func_transforms_around_are_plain() -> None:
    model, x = Mlp(), torch.randn(4, 8)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        with spilling():
            return torch.func.functional_call(model, parameters, (x,)).sum()

    def plain(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    for _ in range(STEPS):
        found = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        expected = torch.vmap(torch.func.grad(plain), (None, 0))(parameters, x)
        assert all(same_bits(found[name], expected[name]) for name in parameters)


def test_vmap_inside_is_plain() -> None:
    x, w = leaf(5, 8), leaf(8, 8)

    def run() -> Tensor:
        one = lambda row: functional.silu(row @ w).exp() * (row + 1)  # noqa: E731
        return padded(torch.vmap(one)(x * 2))

    assert_plain_gradients(run, [x, w])


def test_a_func_gradient_inside_raises_as_under_any_hooks() -> None:
    """torch.func refuses saved-tensor hooks set outside."""
    with spilling(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.sin().sum())(torch.randn(4))


@contextmanager
def new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_inside_is_plain() -> None:
    """The compiled region saves its activations as one node."""
    model, x = Stack(depth=3), leaf(4, 8)
    with new_compiler():
        compiled = [torch.compile(block, backend="aot_eager") for block in model.blocks]

        def run() -> Tensor:
            h = x.sin()
            for block in compiled:
                h = block(h).exp().sin()
            return h

        assert_plain_gradients(run, [x, *model.parameters()])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_is_plain() -> None:
    model, x = Stack(depth=3), leaf(4, 8)
    with torch.autograd.set_detect_anomaly(True):
        assert_plain_gradients(lambda: model(x), [x, *model.parameters()])


def test_a_default_device_context_is_plain() -> None:
    model, x = Block(), leaf(4, 8)
    with torch.device("cpu"):
        assert_plain_gradients(lambda: padded(padded(model(x))), [x, *model.parameters()])


class Ops(TorchDispatchMode):
    """The ops that ran, autograd's own detaches aside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_in_forward_does_not_see_the_offloader() -> None:
    x, seen = leaf(16), []
    for context in plain_and_offloaded():
        with context, Ops() as ops:
            padded(functional.silu(x + 1) * 2).sum()
        seen.append(ops.seen)
    assert seen == [seen[0]] * (STEPS + 1)


def test_a_dispatch_mode_in_backward_does_not_see_the_offloader() -> None:
    x, seen = leaf(16), []
    for context in plain_and_offloaded():
        with context:
            loss = padded(functional.silu(x + 1) * 2).sum()
        with Ops() as ops:
            torch.autograd.grad(loss, x)
        seen.append(ops.seen)
    assert seen == [seen[0]] * (STEPS + 1)


def test_training_with_an_optimizer_is_plain() -> None:
    def train(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(depth=4, drop=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(8):
            optimizer.zero_grad()
            with context:
                loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
        return list(model.parameters())

    assert all(map(same_bits, train(spilling()), train(nullcontext())))


def test_an_optimizer_that_steps_in_backward_is_plain() -> None:
    def train(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(depth=4)
        scale = nn.Parameter(torch.ones(8))

        @torch.no_grad()
        def update(p: Tensor) -> None:
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in (*model.parameters(), scale):
            p.register_post_accumulate_grad_hook(update)
        for _ in range(6):
            with context:
                h = torch.randn(4, 8)
                for block in model.blocks:
                    h = block(functional.silu(h * scale) * scale)
            h.square().mean().backward()
        return [*model.parameters(), scale]

    assert all(map(same_bits, train(spilling()), train(nullcontext())))


def test_a_backward_that_changes_what_it_saved_is_an_error_for_the_next_that_needs_it() -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            x.mul_(0)
            return grads[0]

    x = leaf(64)
    for context in (nullcontext(), *[spilling()] * STEPS):
        with context:
            y = x + 1
            loss = y.sin().sum() + Careless.apply(y).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
