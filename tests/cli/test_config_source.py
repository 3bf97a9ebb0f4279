"""Models of transformers by their configurations, with batches that fit them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.cli.config_source import ConfigSource
from rekindle.cli.failures import UsageError
from rekindle.cli.steps import Sizes

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 5}
TOKENS = {"input_ids": (2, 8), "labels": (2, 8)}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, tuple[int, ...]]]] = {
    "decoder": ("LlamaConfig", {**SIZES, "num_key_value_heads": 2}, "LlamaForCausalLM", TOKENS),
    "encoder": ("BertConfig", SIZES, "BertForMaskedLM", TOKENS),
    "encoder and decoder": (
        "BartConfig",
        {**ENCODER_DECODER, "max_position_embeddings": 40, "encoder_layerdrop": 0.5},
        "BartForConditionalGeneration",
        TOKENS,
    ),
    "image": (
        "ViTConfig",
        {**SIZES, **IMAGE},
        "ViTForImageClassification",
        {"pixel_values": (2, 3, 16, 16), "labels": (2,)},
    ),
    "speech": (
        "WhisperConfig",
        {**ENCODER_DECODER, **SPEECH, "pad_token_id": 0, "decoder_start_token_id": 1},
        "WhisperForConditionalGeneration",
        {"input_features": (2, 8, 32), "labels": (2, 8)},
    ),
    "loss of its own": (
        "ViTMAEConfig",
        {**SIZES, **IMAGE, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1},
        "ViTMAEForPreTraining",
        {"pixel_values": (2, 3, 16, 16)},
    ),
}


def write(folder: Path, config: str, options: dict[str, Any], **more: Any) -> Path:
    values = getattr(transformers, config)(**options).to_dict() | more
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


def llama(folder: Path, **more: Any) -> Path:
    return write(folder, *CASES["decoder"][:2], **more)


@pytest.mark.parametrize("case", CASES)
def test_the_class_and_the_batch_follow_from_the_configuration(tmp_path: Path, case: str) -> None:
    config, options, kind, shapes = CASES[case]
    source = ConfigSource(str(write(tmp_path, config, options)), None)
    length = 8 if {"input_ids", "input_features"} & set(shapes) else None
    made = source.step(Sizes(batch=2, seq=length, dtype=torch.float32), "cpu")
    assert type(made.model).__name__ == kind
    assert made.model.training
    assert {name: tuple(tensor.shape) for name, tensor in made.batch.items()} == shapes
    loss = made.model(**made.batch).loss
    assert (loss.dim(), loss.requires_grad) == (0, True)


def test_without_memory_nothing_is_allocated(tmp_path: Path) -> None:
    made = ConfigSource(str(llama(tmp_path)), None).step(Sizes(), "meta")
    assert all(tensor.is_meta for tensor in (*made.model.parameters(), *made.batch.values()))


def test_the_class_that_the_configuration_names_counts_and_another_that_is_asked_for_more(
    tmp_path: Path,
) -> None:
    path = llama(tmp_path, architectures=["LlamaForTokenClassification"])
    assert ConfigSource(str(path), None).kind is transformers.LlamaForTokenClassification
    asked = ConfigSource(str(path), "LlamaForSequenceClassification")
    assert asked.step(Sizes(batch=1), "meta").batch["labels"].shape == (1,)
    with pytest.raises(UsageError, match="a model of transformers, but is Llama4U"):
        ConfigSource(str(path), "Llama4U")


def test_a_folder_stands_for_its_configuration(tmp_path: Path) -> None:
    llama(tmp_path)
    assert ConfigSource(str(tmp_path), None).kind is transformers.LlamaForCausalLM


def test_a_sequence_has_a_power_of_two_of_tokens_that_the_model_has_positions_for(
    tmp_path: Path,
) -> None:
    source = ConfigSource(str(llama(tmp_path)), None)
    assert source.step(Sizes(), "meta").batch["input_ids"].shape == (1, 32)
    assert source.step(Sizes(seq=100), "meta").batch["input_ids"].shape == (1, 100)
    assert (source.most("sequence"), source.most("batch")) == (40, None)


def test_the_dtype_is_that_of_the_configuration_unless_one_is_asked_for(tmp_path: Path) -> None:
    def dtype(path: Path, sizes: Sizes) -> torch.dtype:
        made = ConfigSource(str(path), None).step(sizes, "meta")
        return next(made.model.parameters()).dtype

    assert dtype(llama(tmp_path), Sizes()) == torch.bfloat16
    assert dtype(llama(tmp_path, dtype="float16"), Sizes()) == torch.float16
    assert dtype(llama(tmp_path, dtype="float16"), Sizes(dtype=torch.float32)) == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UsageError, match=r"nothing is fetched. To fetch it: hf download some/model"
    ):
        ConfigSource("some/model", None)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("raise SystemExit('it ran')\n")
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="code of its own, which is not run"):
        ConfigSource(str(tmp_path), None)


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "followed by a config.json"), ("nowhere/config.json", "There is no file or folder")],
)
def test_a_path_to_nothing_is_refused(path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConfigSource(path, None)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no config.json in "):
        ConfigSource(str(tmp_path), None)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read as a configuration"):
        ConfigSource(str(tmp_path / "config.json"), None)


def test_an_input_whose_shape_is_not_known_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "Pix2StructConfig", {})
    with pytest.raises(UsageError, match="takes flattened_patches, whose shape does not follow"):
        ConfigSource(str(path), "Pix2StructForConditionalGeneration").step(Sizes(), "meta")


def test_images_have_no_length(tmp_path: Path) -> None:
    config, options, _, _ = CASES["image"]
    source = ConfigSource(str(write(tmp_path, config, options)), None)
    with pytest.raises(UsageError, match="takes pixel_values, which have no length"):
        source.step(Sizes(seq=8), "meta")
