"""Models of transformers, trained with strategies and without: the same curve, bit for bit."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import policies
from rekindle.strategy import Keep
from tests.toys import same_bits

transformers = pytest.importorskip("transformers")

from rekindle.integrations import transformers as ours  # noqa: E402

STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration, what it is fed, and how many layers it runs."""

    model: str
    config: str
    options: dict[str, Any]
    layers: int = 3
    feed: str = "tokens"

    def build(self, **more: Any) -> nn.Module:
        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**self.options, **more)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2)
        if self.feed == "images":
            return {
                "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
                "labels": torch.tensor([0, 1]),
            }
        tokens = torch.randint(1, 64, (2, 8), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**DECODER, "attention_dropout": 0.1, "attn_implementation": "eager"},
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": 32}),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        layers=2 + 3,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1},
        feed="images",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **DECODER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,  # these leave a region by the side, for another loss
        },
    ),
    "qwen3 moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3},
    ),
    "recurrent gemma": Family(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {**SIZES, "head_dim": 8, "num_key_value_heads": 1, "lru_width": 32},
    ),
}
every_family = pytest.mark.parametrize("name", FAMILIES)
WHATS: dict[str, Any] = {
    "recompute": "recompute",
    "policy": policies.keep_matmuls_and_attention,
}
every_what = pytest.mark.parametrize("what", WHATS.values(), ids=WHATS)

Curve = list[Tensor]


def train(model: nn.Module, batch: dict[str, Tensor], steps: int = STEPS) -> Curve:
    """The loss of each step, then every gradient of the last one, then every parameter."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    curve: Curve = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    curve += [p.grad for p in model.parameters() if p.grad is not None]
    return [*curve, *(p.detach() for p in model.parameters())]


@functools.cache
def plain(name: str) -> Curve:
    """The curve without strategies, and without a cache of keys, which lays them out in another
    way: that alone changes the last bits of GPT-2 and T5."""
    return train(FAMILIES[name].build(use_cache=False), FAMILIES[name].batch())


def same(a: Curve, b: Curve) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


@every_what
@every_family
def test_training_with_strategies_is_training_without_them(name: str, what: Any) -> None:
    family = FAMILIES[name]
    model = family.build()
    ours.apply(model, what)
    with rekindle.observe() as seen:
        curve = train(model, family.batch())
    assert same(curve, plain(name))
    assert (seen.total.forwards, seen.total.replays) == (family.layers * STEPS,) * 2


class Bare(transformers.PreTrainedModel):  # type: ignore[misc]
    """A model that knows nothing of checkpointing, as those that come with code of their own."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: Any, names: list[str]) -> None:
        super().__init__(config)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head = nn.Bilinear(4, 4, 1)
        self._no_split_modules = names


def paths(model: nn.Module) -> list[str]:
    return [entry.path for entry in ours.apply(model, "recompute").entries]


def test_blocks_are_the_modules_that_a_model_does_not_let_be_split() -> None:
    assert paths(Bare(transformers.PretrainedConfig(), ["Bilinear"])) == ["head"]


def test_blocks_of_a_model_that_declares_none_are_those_that_rekindle_finds() -> None:
    assert paths(Bare(transformers.PretrainedConfig(), [])) == ["parts.0", "parts.1", "parts.2"]


def test_modules_are_named_by_their_paths() -> None:
    """Field note 30: not all or nothing."""
    family = FAMILIES["llama"]
    model = family.build()
    ours.apply(model, {"model.layers.*.mlp": "recompute", "model.layers.2": "recompute"})
    with rekindle.observe() as seen:
        curve = train(model, family.batch(), steps=1)
    assert same(curve, train(family.build(use_cache=False), family.batch(), steps=1))
    assert {name: counts.forwards for name, counts in seen.regions.items()} == {
        "LlamaMLP.forward": 3,
        "LlamaDecoderLayer.forward": 1,
    }


def has_cache(model: nn.Module, *args: Any, **options: Any) -> bool:
    tokens = FAMILIES["llama"].batch()["input_ids"]
    return model(tokens, *args, **options).past_key_values is not None


@pytest.fixture
def llama() -> nn.Module:
    return FAMILIES["llama"].build()


def test_a_cache_is_off_while_training(llama: nn.Module) -> None:
    """Whoever asks for it, as with transformers' own switch: a replay would fill it again."""
    assert has_cache(llama)
    ours.apply(llama)
    assert not has_cache(llama)
    assert not has_cache(llama, use_cache=True)
    assert not has_cache(llama, None, None, None, None, None, True)
    assert not has_cache(llama.model)


def test_a_cache_is_on_in_evaluation(llama: nn.Module) -> None:
    ours.apply(llama)
    assert has_cache(llama.eval())


def test_remove_lets_a_model_have_its_cache_again(llama: nn.Module) -> None:
    before = {name: set(vars(module)) for name, module in llama.named_modules()}
    ours.apply(llama)
    ours.apply(llama)
    ours.remove(llama)
    assert has_cache(llama)
    assert {name: set(vars(module)) for name, module in llama.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in llama.modules())


def test_what_is_saved_and_generated_is_that_of_the_plain_model(
    llama: nn.Module, tmp_path: Path
) -> None:
    prompt = FAMILIES["llama"].batch()["input_ids"]
    llama.eval()
    expected = llama.generate(prompt, max_new_tokens=4, do_sample=False)
    ours.apply(llama)
    assert torch.equal(llama.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    llama.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.use_cache
    assert same(list(loaded.parameters()), list(llama.parameters()))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_strategies_and_a_cache_of_its_own(
    copied: Callable[[nn.Module], nn.Module], llama: nn.Module
) -> None:
    ours.apply(llama)
    twin = copied(llama)
    ours.remove(llama)
    assert has_cache(llama)
    with rekindle.observe() as seen:
        assert same(train(twin, FAMILIES["llama"].batch()), plain("llama"))
    assert (seen.total.forwards, seen.total.replays) == (3 * STEPS,) * 2
    ours.remove(twin)
    assert has_cache(twin)


# Transformers' own switch


@pytest.fixture
def patched() -> Iterator[Any]:
    with rekindle.patch_torch() as patch:
        yield patch


@every_family
def test_the_switch_of_transformers_takes_a_policy(name: str, patched: Any) -> None:
    family = FAMILIES[name]
    model = family.build()
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": policies.keep_matmuls_and_attention}
    )
    with rekindle.observe() as seen:
        curve = train(model, family.batch())
    assert same(curve, plain(name))
    assert (seen.total.forwards, seen.total.replays) == (family.layers * STEPS,) * 2


def test_the_switch_of_transformers_takes_every_nth_layer(llama: nn.Module, patched: Any) -> None:
    llama.gradient_checkpointing_enable(every_n_layers=2)
    with rekindle.observe() as seen:
        assert same(train(llama, FAMILIES["llama"].batch()), plain("llama"))
    assert (seen.total.forwards, seen.total.replays) == (2 * STEPS,) * 2


def test_a_model_whose_switch_is_on_is_refused(llama: nn.Module) -> None:
    llama.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"call gradient_checkpointing_disable\(\) first"):
        ours.apply(llama)
    assert has_cache(llama.eval())


# The trainer


def trainer(folder: Path, model: nn.Module, callbacks: Any = (), **options: Any) -> Any:
    pytest.importorskip("accelerate")  # the trainer of transformers needs it
    tokens = torch.randint(1, 64, (8, 8), generator=torch.Generator().manual_seed(2))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))


def curve_of(trained: Any) -> Curve:
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return [torch.tensor(losses), *(p.detach() for p in trained.model.parameters())]


PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"bf16": True}}
every_precision = pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)
IN_TRAINER = 3 * STEPS * 2  # layers, steps, micro-batches


@every_precision
@every_what
def test_a_callback_gives_strategies_for_the_time_of_training(
    what: Any, options: Any, tmp_path: Path
) -> None:
    build = FAMILIES["llama"].build
    without = trainer(tmp_path, build(), **options)
    without.train()
    model = build()
    before = set(vars(model.model.layers[0]))
    ran = trainer(tmp_path, model, [ours.Callback(what)], **options)
    with rekindle.observe() as seen:
        ran.train()
    assert same(curve_of(ran), curve_of(without))
    assert (seen.total.forwards, seen.total.replays) == (IN_TRAINER, IN_TRAINER)
    assert set(vars(model.model.layers[0])) == before


@pytest.mark.parametrize(
    "given",
    [None, {"use_reentrant": False, "context_fn": policies.keep_matmuls_and_attention}],
    ids=["default", "policy"],
)
def test_gradient_checkpointing_of_the_trainer_runs_on_rekindle(
    given: Any, patched: Any, tmp_path: Path
) -> None:
    build = FAMILIES["llama"].build
    without = trainer(tmp_path, build())
    without.train()
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": given}
    ran = trainer(tmp_path, build(), **options)
    with rekindle.observe() as seen:
        ran.train()
    assert same(curve_of(ran), curve_of(without))
    assert (seen.total.forwards, seen.total.replays) == (IN_TRAINER, IN_TRAINER)


def test_a_callback_beside_the_trainers_own_switch_is_refused(tmp_path: Path) -> None:
    model = FAMILIES["llama"].build()
    both = trainer(tmp_path, model, [ours.Callback()], gradient_checkpointing=True)
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\) first"):
        both.train()


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_trainer_takes_a_budget(
    use_cache: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("scipy")
    build = FAMILIES["llama"].build
    without = trainer(tmp_path, build(use_cache=False))
    without.train()
    callback = ours.Callback(budget="70%")
    ran = trainer(tmp_path, build(use_cache=use_cache), [callback])
    with caplog.at_level("WARNING", "rekindle"):
        ran.train()
    assert [record for record in caplog.records if record.name == "rekindle"] == []
    assert rekindle.plan_of(ran.model) is None
    assert same(curve_of(ran), curve_of(without))
    assert callback.plan is not None
    assert callback.plan.measured_peak is not None
    assert callback.plan.measured_peak <= callback.plan.budget
    assert any(option.strategy != Keep() for _, _, option in callback.plan.blocks)


def test_a_callback_plans_with_the_loss_that_it_is_given() -> None:
    model = Family("LlamaForCausalLM", "LlamaConfig", DECODER).build()
    tokens = torch.randint(64, (2, 16))

    def loss(out: Any, batch: Any) -> Tensor:
        flat: Tensor = out.logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, batch["input_ids"].flatten())

    callback = ours.Callback(budget="1GiB", loss=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_begin(model=model, train_dataloader=[{"input_ids": tokens}])
    assert callback.plan is not None
    callback.on_train_end(model=model)


def test_a_loss_without_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="loss= goes with budget="):
        ours.Callback("recompute", loss=lambda out: out.loss)
