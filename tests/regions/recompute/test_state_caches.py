"""Models of transformers called with a cache of keys and values, in regions."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, _deregister_pytree_node

import rekindle
from rekindle import policies
from tests.toys import same_bits

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
SEQ2SEQ = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": SMALL,
    "Mistral": SMALL | {"sliding_window": 3},
    "Gemma2": SMALL | {"sliding_window": 3, "head_dim": 8, "attn_implementation": "eager"},
    "Falcon": {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "GPT2": {"vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32},
    "Mamba": {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    "Whisper": SEQ2SEQ | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 32},
    "Bart": SEQ2SEQ | {"max_position_embeddings": 32},
    "T5": {
        "vocab_size": 32,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
}
DECODERS = ("Llama", "Mistral", "Gemma2", "Falcon", "GPT2")
LAYERS = {
    "Falcon": ("transformer.h.*",),
    "GPT2": ("transformer.h.*",),
    "Mamba": ("backbone.layers.*",),
    "Whisper": ("model.encoder.layers.*", "model.decoder.layers.*"),
    "Bart": ("model.encoder.layers.*", "model.decoder.layers.*"),
    "T5": ("encoder.block.*", "decoder.block.*"),
}
CLASSES = {"GPT2": "GPT2LMHeadModel"} | dict.fromkeys(
    ("Whisper", "Bart", "T5"), "ForConditionalGeneration"
)


def build(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES[name])
    kind = CLASSES.get(name, "ForCausalLM")
    torch.manual_seed(1)
    model = getattr(transformers, kind if kind.startswith(name) else name + kind)(config)
    return model.train()  # type: ignore[no-any-return]


def layers_of(name: str) -> tuple[str, ...]:
    return LAYERS.get(name, ("model.layers.*",))


def batch(name: str) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 32, (2, 6), generator=source)
    if name == "Whisper":
        return {"input_features": torch.randn(2, 4, 16, generator=source), "labels": ids}
    if name == "Bart":  # which keeps no cache when it is given labels
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids, "labels": ids}


def contents(value: Any) -> Any:
    """What a cache holds, to be compared."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.detach().float().tolist()
    if isinstance(value, list | tuple):
        return [contents(item) for item in value]
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    if type(value).__module__.startswith("transformers"):
        return type(value).__name__, contents(vars(value))
    return value


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor | None], Any]:
    """Loss, gradients, and what the cache holds when all is done."""
    model.zero_grad()
    torch.manual_seed(3)
    out = model(**inputs)
    loss: Tensor = out["loss"] if "loss" in out else out["logits"].square().mean()
    loss.backward()
    cache = out.get("past_key_values", out.get("cache_params"))
    assert cache is not None
    return loss.detach(), [p.grad for p in model.parameters()], contents(cache)


def assert_same_step(name: str, strategy: Any, inputs: Callable[[nn.Module], Any]) -> None:
    """The step with the layers in regions is that without, and so is the cache after it."""
    plain, model = build(name), build(name)
    rekindle.apply(model, dict.fromkeys(layers_of(name), strategy))
    with rekindle.observe() as seen:
        ours = step(model, inputs(model))
    assert seen.total.replays > 0 or strategy == "offload"
    expected = step(plain, inputs(plain))
    assert same_bits(expected[0], ours[0])
    assert all(map(same_bits, expected[1], ours[1]))
    assert expected[2] == ours[2]


@pytest.mark.parametrize("name", SIZES)
def test_layers_that_fill_the_cache_that_their_model_makes_are_recomputed(name: str) -> None:
    assert_same_step(name, "recompute", lambda _: batch(name) | {"use_cache": True})


@pytest.mark.parametrize("strategy", [policies.keep_matmuls, "offload"], ids=["policy", "offload"])
@pytest.mark.parametrize("name", ["Llama", "Falcon", "Whisper"])
def test_layers_that_fill_a_cache_run_by_other_strategies(name: str, strategy: Any) -> None:
    assert_same_step(name, strategy, lambda _: batch(name) | {"use_cache": True})


def dynamic(model: nn.Module) -> Any:
    return transformers.DynamicCache(config=model.config)


def plain_dynamic(_: nn.Module) -> Any:
    return transformers.DynamicCache()


def static(model: nn.Module) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=16)


CACHES = {"dynamic": dynamic, "without its config": plain_dynamic, "static": static}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


@every_cache
@pytest.mark.parametrize("name", DECODERS)
def test_layers_that_fill_a_given_cache_are_recomputed(
    name: str, make: Callable[[nn.Module], Any]
) -> None:
    assert_same_step(
        name, "recompute", lambda model: batch(name) | {"past_key_values": make(model)}
    )


@every_cache
@pytest.mark.parametrize("name", DECODERS)
def test_layers_that_add_to_a_filled_cache_are_recomputed(
    name: str, make: Callable[[nn.Module], Any]
) -> None:
    """The memory of a static one is there already, and is written to in place."""

    def inputs(model: nn.Module) -> dict[str, Any]:
        cache = make(model)
        torch.manual_seed(4)
        with torch.no_grad():
            model(batch(name)["input_ids"][:, :4], past_key_values=cache, use_cache=True)
        return batch(name) | {"past_key_values": cache}

    assert_same_step(name, "recompute", inputs)


def test_a_given_cache_of_an_encoder_and_a_decoder_is_filled_once() -> None:
    def inputs(_: nn.Module) -> dict[str, Any]:
        caches = transformers.DynamicCache(), transformers.DynamicCache()
        return batch("T5") | {"past_key_values": transformers.EncoderDecoderCache(*caches)}

    assert_same_step("T5", "recompute", inputs)


class Attention(nn.Module):
    """One attention that adds to a cache, whatever that is called and wherever it is."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.index = index

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache = next(_caches([args, kwargs]))
        cache = getattr(cache, "self_attention_cache", cache)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        k, v = cache.update(k, v, self.index)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + out.transpose(1, 2).flatten(2)


def _caches(value: Any) -> Iterator[Any]:
    if isinstance(value, transformers.Cache):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _caches(part)


def _quantized() -> Any:
    layers = [transformers.cache_utils.Fp8QuantizedLayer() for _ in range(2)]
    return transformers.Cache(layers=layers)


def _sliding() -> Any:
    kind = transformers.cache_utils.DynamicSlidingWindowLayer
    return transformers.Cache(layers=[kind(sliding_window=3) for _ in range(2)])


def _static_sliding() -> Any:
    kind = transformers.cache_utils.StaticSlidingWindowLayer
    return transformers.Cache(layers=[kind(max_cache_len=8, sliding_window=3) for _ in range(2)])


KINDS = {
    "dynamic": transformers.DynamicCache,
    "encoder and decoder": lambda: transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    ),
    "quantized": _quantized,
    "sliding": _sliding,
    "static sliding": _static_sliding,
}
PASSED: dict[str, Callable[[nn.Module, Tensor, Any], Tensor]] = {
    "by position": lambda f, x, c: f(x, c),
    "past_key_value": lambda f, x, c: f(x, past_key_value=c),
    "layer_past": lambda f, x, c: f(x, None, layer_past=c),
    "in a tuple": lambda f, x, c: f(x, (None, (c,))),
    "in a dict": lambda f, x, c: f(x, memory={"kv": [c]}),
}


@pytest.mark.parametrize("call", PASSED.values(), ids=PASSED)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_cache_is_filled_once_whatever_its_class_and_however_it_is_passed(
    kind: Callable[[], Any], call: Callable[[nn.Module, Tensor, Any], Tensor]
) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Attention(i) for i in range(2))
    ours = copy.deepcopy(plain)
    rekindle.apply(ours, {"*": "recompute"})
    results = []
    for layers in (plain, ours):
        cache, x = kind(), torch.linspace(-1, 1, 80).view(2, 5, 8).requires_grad_()
        out = x
        for layer in layers:
            out = call(layer, out, cache)
        out.square().sum().backward()
        results.append((contents(cache), [x.grad, *(p.grad for p in layers.parameters())]))
    assert results[0][0] == results[1][0]
    assert all(map(same_bits, results[0][1], results[1][1]))


def test_keys_and_values_in_tuples_are_arguments_like_any_others() -> None:
    x, past = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)

    def attend(x: Tensor, past: tuple[tuple[Tensor, Tensor], ...]) -> tuple[Tensor, Any]:
        keys, values = torch.cat([past[0][0], x]), torch.cat([past[0][1], x.sin()])
        return (x @ keys.T).softmax(-1) @ values, ((keys, values),)

    grads = []
    for run in (lambda f, *a: f(*a), rekindle.checkpoint):
        out, (filled,) = run(attend, x, ((past, past.cos()),))
        (out.sum() + filled[0].square().sum()).backward()
        grads.append((x.grad, past.grad))
        x.grad = past.grad = None
    assert all(map(same_bits, *grads))


def test_some_steps_with_one_static_cache_are_those_without_regions() -> None:
    """By then it is known which tensors each layer writes to."""
    plain, model = build("Llama"), build("Llama")
    rekindle.apply(model, {"model.layers.*": "recompute"})
    for run in (plain, model):
        cache = transformers.StaticCache(config=run.config, max_cache_len=256)
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for _ in range(6):
            step(run, batch("Llama") | {"past_key_values": cache})
            optimizer.step()
            for layer in cache.layers:  # the next step begins with a graph of its own
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


def test_fit_on_a_model_that_is_called_with_a_cache_has_the_plain_gradients() -> None:
    plain, model = build("Llama"), build("Llama")
    inputs = batch("Llama")
    plan = rekindle.fit(model, inputs, "60%")
    given = [inputs | {"past_key_values": dynamic(run)} for run in (plain, model)]
    expected, ours = step(plain, given[0]), step(model, given[1])
    assert any(strategy != "keep" for _, strategy, _ in plan.blocks)
    assert all(map(same_bits, expected[1], ours[1]))
    assert expected[2] == ours[2]


def test_a_cache_that_is_registered_for_export_is_filled_once() -> None:
    """What its registration takes apart is the keys and values alone, not what else it holds."""
    executorch = pytest.importorskip("transformers.integrations.executorch")
    register = executorch.register_dynamic_cache_export_support
    before = dict(SUPPORTED_NODES)
    try:
        if transformers.DynamicCache not in SUPPORTED_NODES:
            register()
        assert_same_step(
            "Mistral",
            "recompute",
            lambda model: batch("Mistral") | {"past_key_values": dynamic(model)},
        )
    finally:
        for kind in SUPPORTED_NODES.keys() - before.keys():
            _deregister_pytree_node(kind)


@pytest.mark.parametrize("make", [dynamic, static], ids=["dynamic", "static"])
def test_fit_refuses_a_batch_that_the_step_writes_to_and_leaves_it_as_it_was(
    make: Callable[[nn.Module], Any],
) -> None:
    model = build("Llama")
    cache = make(model)
    before = contents(cache)
    with pytest.raises(ValueError, match=r"writes to its batch, to past_key_values \(\w+Cache\)"):
        rekindle.fit(model, batch("Llama") | {"past_key_values": cache}, "60%")
    assert contents(cache) == before
    assert all(parameter.grad is None for parameter in model.parameters())
