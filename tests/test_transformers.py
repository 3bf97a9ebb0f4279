"""Models that nobody here wrote, with `gradient_checkpointing_enable()` under `patch_torch()`."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import same_bits

transformers = pytest.importorskip("transformers")

LLAMA_LAYERS = 3
T5_LAYERS = 2 + 3  # encoder and decoder


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LLAMA_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        **options,
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def llama_with_dropout() -> nn.Module:
    """Eager attention, since the fused one draws its dropout in one op."""
    return llama(attention_dropout=0.2, attn_implementation="eager")


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0.2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(1)
    return transformers.T5ForConditionalGeneration(config).train()  # type: ignore[no-any-return]


MODELS = {
    "llama": (llama, LLAMA_LAYERS),
    "llama with dropout": (llama_with_dropout, LLAMA_LAYERS),
    "t5": (t5, T5_LAYERS),
}
every_model = pytest.mark.parametrize(("build", "layers"), MODELS.values(), ids=MODELS)
OPTIONS: dict[str, Any] = {
    "default": None,
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}
every_way = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def tokens() -> Tensor:
    return torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(2))


def step(model: nn.Module, seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach()


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    """Parameters, their gradients and buffers, bit for bit; and there are gradients."""
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert same_bits(x, y), name
        assert same_bits(x.grad, y.grad), f"gradient of {name}"
    for (name, x), (_, y) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        assert same_bits(x, y), name
    assert any(x.grad is not None for x in a.parameters())


@pytest.fixture(autouse=True)
def patched() -> Iterator[Any]:
    with rekindle.patch_torch() as patch:
        yield patch


Build = Callable[[], nn.Module]


@every_way
@every_model
def test_every_layer_runs_on_our_engine(build: Build, layers: int, options: Any) -> None:
    model = build()
    model.gradient_checkpointing_enable(options)
    with rekindle.observe() as seen:
        step(model)
    assert (seen.total.forwards, seen.total.replays) == (layers, layers)


@pytest.mark.parametrize("options", [None, {"use_reentrant": False}], ids=["default", "given"])
@every_model
def test_a_step_is_that_of_the_model_without_checkpointing(
    build: Build, layers: int, options: Any
) -> None:
    plain, model = build(), build()
    model.gradient_checkpointing_enable(options)
    assert same_bits(step(plain), step(model))
    assert_same_state(plain, model)


@every_model
def test_a_reentrant_step_is_that_of_torchs_reentrant_engine(
    build: Build, layers: int, patched: Any
) -> None:
    """And not bit for bit that of the plain T5: its decoder layers share the encoder's output, and
    a reentrant region sums the gradients of its own uses of it before they meet the others."""
    theirs, model = build(), build()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    loss = step(model)
    patched.undo()
    theirs.gradient_checkpointing_enable({"use_reentrant": True})
    with rekindle.observe() as seen:
        assert same_bits(step(theirs), loss)
    assert seen.total.forwards == 0
    assert_same_state(theirs, model)


@every_model
def test_the_rng_after_a_step_is_that_of_the_model_without_checkpointing(
    build: Build, layers: int
) -> None:
    plain, model = build(), build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step(plain)
    after = torch.get_rng_state()
    step(model)
    assert torch.equal(after, torch.get_rng_state())


@every_model
def test_some_steps_of_training_are_those_without_checkpointing(build: Build, layers: int) -> None:
    plain, model = build(), build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for run in (plain, model):
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        for seed in range(3):
            optimizer.zero_grad()
            step(run, seed)
            optimizer.step()
    assert_same_state(plain, model)


def test_a_model_in_eval_makes_no_region() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    model.eval()
    with rekindle.observe() as seen:
        step(model)
    assert seen.total.forwards == 0


def test_checkpointing_can_be_disabled_again() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    with rekindle.observe() as seen:
        step(model)
    assert seen.total.forwards == 0


def test_a_region_holds_the_hidden_states_alone() -> None:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with rekindle.observe() as seen:
        model(input_ids=tokens(), labels=tokens())
    hidden = 2 * 8 * 32 * 4
    assert seen.total.bytes_held >= LLAMA_LAYERS * hidden
    assert seen.total.bytes_dropped > 10 * seen.total.bytes_held


def test_a_copied_model_trains_as_the_original() -> None:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    twin = copy.deepcopy(model)
    assert same_bits(step(model), step(twin))
    assert_same_state(model, twin)


def test_under_autocast_a_step_is_that_of_the_model_without_checkpointing() -> None:
    plain, model = llama_with_dropout(), llama_with_dropout()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for run in (plain, model):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
    assert_same_state(plain, model)


# Field note 16: frozen inputs


class Adapter(nn.Module):
    """A frozen linear layer and a low-rank correction, as LoRA has it."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(self.drop(x)))  # type: ignore[no-any-return]


def adapted(build: Build) -> nn.Module:
    """The model frozen, with adapters in its attention, and no hook that unfreezes its inputs."""
    model = build().requires_grad_(False)
    named = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and name in ("q_proj", "v_proj", "q", "v")
    ]
    for module, name, child in named:
        setattr(module, name, Adapter(child))
    return model


def enable_without_input_require_grads(model: nn.Module) -> None:
    """Transformers 5 calls `enable_input_require_grads` itself; an older one did not."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    embedded = model.get_input_embeddings()(tokens())
    assert not embedded.requires_grad


ADAPTED = {"llama": (llama, LLAMA_LAYERS), "t5": (t5, T5_LAYERS)}
every_adapted = pytest.mark.parametrize(("build", "layers"), ADAPTED.values(), ids=ADAPTED)


@every_adapted
def test_adapters_of_a_frozen_model_train_without_input_require_grads(
    build: Build, layers: int
) -> None:
    """Field note 16, some steps of training."""
    plain, model = adapted(build), adapted(build)
    before = {name: x.clone() for name, x in model.named_parameters()}
    enable_without_input_require_grads(model)
    for run in (plain, model):
        optimizer = torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(3):
            optimizer.zero_grad()
            step(run, seed)
            optimizer.step()
    assert_same_state(plain, model)
    moved = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert moved == {name for name, x in model.named_parameters() if x.requires_grad}


@every_adapted
def test_every_layer_of_a_frozen_model_is_replayed_once(build: Build, layers: int) -> None:
    """Field note 16."""
    model = adapted(build)
    enable_without_input_require_grads(model)
    with rekindle.observe() as seen:
        step(model)
    assert (seen.total.forwards, seen.total.replays) == (layers, layers)


def test_layers_below_the_first_adapter_are_not_replayed() -> None:
    """Field note 16: no gradient flows below, so nothing there is run twice."""
    model = llama().requires_grad_(False)
    attention = model.model.layers[-1].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    enable_without_input_require_grads(model)
    with rekindle.observe() as seen:
        step(model)
    assert (seen.total.forwards, seen.total.replays) == (LLAMA_LAYERS, 1)


@every_adapted
def test_enable_input_require_grads_does_no_harm(build: Build, layers: int) -> None:
    plain, model = adapted(build), adapted(build)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    assert same_bits(step(plain), step(model))
    assert_same_state(plain, model)


def short_llama() -> nn.Module:
    model: Any = llama()
    model.model.layers = model.model.layers[:1]
    return model  # type: ignore[no-any-return]


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return transformers.BertForMaskedLM(config).train()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")  # what the compiler and transformers set off
@pytest.mark.parametrize("build", [short_llama, bert])
def test_a_policy_among_the_checkpointing_options_compiles(build: Build) -> None:
    """Every layer is a region of a graph."""
    options = {"use_reentrant": False, "context_fn": rekindle.policies.keep_matmuls}
    torch.manual_seed(1)
    plain = build()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = copy.deepcopy(plain)
    model.gradient_checkpointing_enable(options)
    torch.compiler.reset()
    with rekindle.observe() as seen:
        loss = step(torch.compile(model, backend="eager"))
    assert same_bits(loss, step(torch.compile(plain, backend="eager")))
    assert_same_state(plain, model)
    assert "tag_activation_checkpoint" in str(seen.regions)  # by which torch runs one of a graph
    torch.compiler.reset()
