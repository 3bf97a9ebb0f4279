"""Models nobody tuned rekindle for: stock classes of transformers, and a few of plain torch.

Each family builds a model with random weights and its batch, in a size for a GPU and a tiny one for
a CPU. A model of transformers is called with its batch and returns an output with a loss; so do
those written here. The weights are float32, and the step runs under bf16 autocast, unless the
family says that all is bf16.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate, mse_loss, silu

Batch = dict[str, Any]
Build = Callable[..., tuple[nn.Module, Batch]]
"""Builds a model and its batch: of the GPU's size if given True, else the tiny ones.

By keyword it takes fields of the configuration that are to be others."""


@dataclass(frozen=True)
class Family:
    """A kind of model in two sizes."""

    title: str
    """The model and batch of the GPU's size."""
    build: Build
    is_bf16: bool = False
    """True if weights are bf16 and there is no autocast."""
    needs: tuple[str, ...] = ("transformers",)
    """Packages that it is built with."""
    depth: Batch = field(default_factory=dict)
    """Fields of the configuration that give the tiny model as many layers as the GPU's has; empty
    if there are none."""

    def case(self, device: str, *, is_large: bool, is_deep: bool = False) -> "Case":
        """Build the model in training mode and its batch on a device, from a fixed seed.

        A deep one is tiny, with as many layers as the large one.
        """
        torch.manual_seed(0)
        with torch.device(device):
            model, batch = self.build(is_large, **(self.depth if is_deep else {}))
        is_bf16 = self.is_bf16 and is_large
        if is_bf16:
            model = model.to(torch.bfloat16)
        return Case(model.train(), batch, device, autocasts=is_large and not is_bf16)


@dataclass(frozen=True)
class Case:
    """A model with its batch, ready to be stepped."""

    model: nn.Module
    batch: Batch
    device: str
    autocasts: bool

    def loss(self) -> Tensor:
        """Run the forward, and return the loss."""
        with self._precision():
            loss: Tensor = self.model(**self.batch).loss
        return loss

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16) if self.autocasts else nullcontext()


def _transformers() -> Any:
    import transformers  # noqa: PLC0415

    return transformers


def _tokens(vocabulary: int, *shape: int) -> Batch:
    tokens = torch.randint(1, vocabulary, shape)
    return {"input_ids": tokens, "labels": tokens}


def _images(count: int, side: int, classes: int) -> Batch:
    return {
        "pixel_values": torch.randn(count, 3, side, side),
        "labels": torch.randint(classes, (count,)),
    }


# Of a tiny language model: no id of a special token may be above its vocabulary.
_TINY_WORDS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _bert(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096}
        if large
        else {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        | {"intermediate_size": 64, "max_position_embeddings": 32, **_TINY_WORDS}
    )
    config = _transformers().BertConfig(**(sizes | depth))
    batch = _tokens(config.vocab_size, *((64, 512) if large else (4, 32)))
    return _transformers().BertForMaskedLM(config), batch


def _gpt2(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"n_embd": 1024, "n_layer": 24, "n_head": 16}
        if large
        else {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 32, **_TINY_WORDS}
    )
    config = _transformers().GPT2Config(use_cache=False, **(sizes | depth))
    batch = _tokens(config.vocab_size, *((16, 1024) if large else (4, 32)))
    return _transformers().GPT2LMHeadModel(config), batch


def _t5(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "d_kv": 64}
        | {"vocab_size": 32128}
        if large
        else {"d_model": 32, "d_ff": 64, "num_layers": 3, "num_heads": 2, "d_kv": 16, **_TINY_WORDS}
    )
    config = _transformers().T5Config(use_cache=False, decoder_start_token_id=0, **(sizes | depth))
    batch = _tokens(config.vocab_size, *((16, 512) if large else (4, 32)))
    return _transformers().T5ForConditionalGeneration(config), batch


def _vit(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096, "num_labels": 1000}
        if large
        else {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        | {"intermediate_size": 64, "num_labels": 10, "image_size": 32, "patch_size": 8}
    )
    model = _transformers().ViTForImageClassification(_transformers().ViTConfig(**(sizes | depth)))
    return model, _images(128, 224, 1000) if large else _images(4, 32, 10)


def _convnext(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024], "num_labels": 1000}
        if large
        else {"depths": [1, 1, 3, 1], "hidden_sizes": [8, 16, 32, 64], "num_labels": 10}
    )
    config = _transformers().ConvNextConfig(drop_path_rate=0.1, **(sizes | depth))
    model = _transformers().ConvNextForImageClassification(config)
    return model, _images(128, 224, 1000) if large else _images(4, 64, 10)


def _resnet(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes: Any = (
        {"num_labels": 1000}
        if large
        else {"depths": [1, 2, 3], "hidden_sizes": [16, 32, 64], "num_labels": 10}
        | {"embedding_size": 8}
    )
    config = _transformers().ResNetConfig(**(sizes | depth))
    model = _transformers().ResNetForImageClassification(config)
    return model, _images(256, 224, 1000) if large else _images(4, 64, 10)


def _swin(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}
        | {"num_labels": 1000}
        if large
        else {"embed_dim": 16, "depths": [2, 4], "num_heads": [2, 4], "num_labels": 10}
        | {"image_size": 32, "patch_size": 2, "window_size": 4}
    )
    model = _transformers().SwinForImageClassification(
        _transformers().SwinConfig(**(sizes | depth))
    )
    return model, _images(64, 224, 1000) if large else _images(4, 32, 10)


def _mixtral(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8}
        if large
        else {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
        | _TINY_WORDS
    )
    config = _transformers().MixtralConfig(use_cache=False, **(sizes | depth))
    batch = _tokens(config.vocab_size, *((4, 2048) if large else (4, 32)))
    return _transformers().MixtralForCausalLM(config), batch


def _lora(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    import peft  # noqa: PLC0415

    sizes = (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        if large
        else {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, **_TINY_WORDS}
    )
    config = _transformers().LlamaConfig(
        use_cache=False, tie_word_embeddings=True, **(sizes | depth)
    )
    model = _transformers().LlamaForCausalLM(config)
    projections = ("q", "k", "v", "o", "gate", "up", "down")
    adapters = peft.LoraConfig(
        r=16 if large else 4,
        target_modules=[f"{name}_proj" for name in projections],
        lora_dropout=0.05,
    )
    if large:
        model = model.to(torch.bfloat16)
    batch = _tokens(config.vocab_size, *((2, 4096) if large else (4, 32)))
    return peft.get_peft_model(model, adapters), batch


def _qwen2(large: bool, **depth: Any) -> tuple[nn.Module, Batch]:
    sizes = (
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
        if large
        else {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, **_TINY_WORDS, "vocab_size": 512}
    )
    config = _transformers().Qwen2Config(
        use_cache=False, tie_word_embeddings=True, **(sizes | depth)
    )
    batch = _tokens(config.vocab_size, *((8, 2048) if large else (4, 32)))
    return _transformers().Qwen2ForCausalLM(config), batch


def _whisper(large: bool) -> tuple[nn.Module, Batch]:
    sizes = (
        {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12}
        | {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
        | {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "dropout": 0.1}
        if large
        else {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.1}
        | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 32}
        | {"max_target_positions": 16, "decoder_start_token_id": 0, **_TINY_WORDS}
    )
    config = _transformers().WhisperConfig(use_cache=False, **sizes)
    count, words = (16, 256) if large else (2, 16)
    batch = {
        "input_features": torch.randn(count, 80, 2 * config.max_source_positions),
        "labels": torch.randint(1, config.vocab_size, (count, words)),
    }
    return _transformers().WhisperForConditionalGeneration(config), batch


def _clip(large: bool) -> tuple[nn.Module, Batch]:
    vision, text = (
        (
            {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
            | {"num_attention_heads": 12, "patch_size": 16},
            {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
            | {"num_attention_heads": 8},
        )
        if large
        else (
            {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
            | {"num_attention_heads": 2, "patch_size": 8, "image_size": 32},
            {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
            | {"num_attention_heads": 2, "max_position_embeddings": 16, **_TINY_WORDS},
        )
    )
    config = _transformers().CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    count, words, side = (256, 77, 224) if large else (4, 16, 32)
    batch = {
        "input_ids": torch.randint(1, config.text_config.vocab_size, (count, words)),
        "pixel_values": torch.randn(count, 3, side, side),
        "return_loss": True,
    }
    return _transformers().CLIPModel(config), batch


def _segformer(large: bool) -> tuple[nn.Module, Batch]:
    sizes: Any = (
        {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "num_labels": 150}
        | {"decoder_hidden_size": 768}
        if large
        else {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 32, 32], "num_labels": 10}
        | {"num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 16}
    )
    model = _transformers().SegformerForSemanticSegmentation(
        _transformers().SegformerConfig(**sizes)
    )
    count, side = (16, 512) if large else (2, 64)
    labels = torch.randint(sizes["num_labels"], (count, side, side))
    return model, {"pixel_values": torch.randn(count, 3, side, side), "labels": labels}


@dataclass
class Output:
    """The output of a model that is written here."""

    loss: Tensor


class Residual(nn.Module):
    """Two convolutions with group norms, around which the input goes, too."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inside), nn.GroupNorm(8, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.around = nn.Conv2d(inside, outside, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(silu(self.norm1(x)))
        out: Tensor = self.around(x) + self.conv2(self.drop(silu(self.norm2(hidden))))
        return out


class UNet(nn.Module):
    """Down to an eighth of the size and up again, with skip connections and no list of modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2 = Residual(width, width), Residual(width, 2 * width)
        self.down3, self.middle = Residual(2 * width, 4 * width), Residual(4 * width, 4 * width)
        self.up3, self.up2 = Residual(8 * width, 2 * width), Residual(4 * width, width)
        self.up1 = Residual(2 * width, width)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image: Tensor, target: Tensor) -> Output:
        high = self.down1(self.stem(image))
        medium = self.down2(avg_pool2d(high, 2))
        low = self.down3(avg_pool2d(medium, 2))
        x = interpolate(self.middle(avg_pool2d(low, 2)), scale_factor=2.0)
        x = interpolate(self.up3(torch.cat([x, low], 1)), scale_factor=2.0)
        x = interpolate(self.up2(torch.cat([x, medium], 1)), scale_factor=2.0)
        x = self.up1(torch.cat([x, high], 1))
        return Output(mse_loss(self.head(silu(x)).float(), target))


def _unet(large: bool) -> tuple[nn.Module, Batch]:
    width, shape = (128, (16, 3, 256, 256)) if large else (8, (2, 3, 32, 32))
    return UNet(width), {"image": torch.randn(shape), "target": torch.randn(shape)}


class Translator(nn.Module):
    """`nn.Transformer` between embeddings and a head."""

    def __init__(self, words: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.transformer = nn.Transformer(dim, heads, layers, layers, 4 * dim, batch_first=True)
        self.head = nn.Linear(dim, words)

    def forward(self, source: Tensor, target: Tensor) -> Output:
        count = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count, target.device)
        hidden = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
        )
        scores = self.head(hidden[:, :-1]).flatten(0, 1).float()
        return Output(cross_entropy(scores, target[:, 1:].flatten()))


def _translator(large: bool) -> tuple[nn.Module, Batch]:
    words, dim, heads, layers = (32000, 1024, 16, 12) if large else (64, 32, 2, 2)
    shape = (16, 512) if large else (4, 32)
    batch = {name: torch.randint(words, shape) for name in ("source", "target")}
    return Translator(words, dim, heads, layers), batch


FAMILIES = {
    "bert": Family("BERT-large, 64 x 512", _bert, depth={"num_hidden_layers": 24}),
    "gpt2": Family("GPT-2 medium, 16 x 1024", _gpt2, depth={"n_layer": 24}),
    "t5": Family("T5-large, 16 x 512", _t5, depth={"num_layers": 24}),
    "vit": Family("ViT-large, 128 images", _vit, depth={"num_hidden_layers": 24}),
    "convnext": Family("ConvNext-base, 128 images", _convnext, depth={"depths": [3, 3, 27, 3]}),
    "resnet": Family(
        "ResNet-50, 256 images",
        _resnet,
        depth={"depths": [3, 4, 6, 3], "hidden_sizes": [16, 32, 64, 128]},
    ),
    "swin": Family("Swin-base, 64 images", _swin, depth={"depths": [2, 18]}),
    "mixtral": Family(
        "Mixtral-like, 12 layers, 8 experts, bf16",
        _mixtral,
        is_bf16=True,
        depth={"num_hidden_layers": 12, "num_local_experts": 8},
    ),
    "lora": Family(
        "Llama 1B + LoRA, 2 x 4096, bf16",
        _lora,
        is_bf16=True,
        needs=("transformers", "peft"),
        depth={"num_hidden_layers": 16},
    ),
    "qwen2": Family(
        "Qwen2 0.5B, 8 x 2048, bf16", _qwen2, is_bf16=True, depth={"num_hidden_layers": 24}
    ),
    "whisper": Family("Whisper-small, 16 x 30 s", _whisper),
    "clip": Family("CLIP ViT-B/16, 256 pairs", _clip),
    "segformer": Family("SegFormer-B2, 16 x 512 x 512", _segformer),
    "unet": Family("UNet of plain torch, 16 x 256 x 256", _unet, needs=()),
    "translator": Family("`nn.Transformer`, 12 + 12 layers, 16 x 512", _translator, needs=()),
}
"""By the name that `--model` takes. The first ten are those of the table that plans began from."""
