"""Models with a batch of each kind, and helpers to compare their steps, for tests of `fit`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from examples import demo
from rekindle.planner.types import Profile
from tests.toys import Block, Mlp, Stack, gradients, same_bits

Case = tuple[nn.Module, Any]


class Language(nn.Module):
    """An embedding, blocks, a head and a loss; given by keywords."""

    def __init__(self, dim: int = 16, depth: int = 4, drop: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(40, dim)
        self.stack = Stack(depth, dim, drop)
        self.head = nn.Linear(dim, 40)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.head(self.stack(self.words(words)))
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class TwoKinds(nn.Module):
    """Blocks with a norm and without, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.ModuleList(Block(16, 0.1) for _ in range(2))
        self.bare = nn.ModuleList(Mlp(16, 64, 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for normed, bare in zip(self.normed, self.bare, strict=True):
            x = bare(normed(x))
        return x


class Twice(nn.Module):
    """Every block is run on the way there and on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 0.1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *reversed(self.blocks)):
            x = block(x)
        return x


class Normed(nn.Module):
    """A block that updates buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.mlp = Mlp(16, 32, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm(x))
        return out


def small_gpt() -> Case:
    torch.manual_seed(0)
    model = demo.GPT(demo.plain)
    model.blocks = model.blocks[:3]
    codes, following = demo.draw_batch()
    return model, (codes[:2], following[:2])


def sequential() -> Case:
    return nn.Sequential(nn.Linear(8, 16), *(Block(16, 0.1) for _ in range(3))), torch.randn(64, 8)


def two_kinds() -> Case:
    return TwoKinds(), torch.randn(64, 16)


def twice() -> Case:
    return Twice(), (torch.randn(64, 16),)


def by_keywords() -> Case:
    words = torch.randint(40, (2, 64))
    return Language(), {"words": words[0], "labels": words[1]}


def by_function() -> Case:
    model, batch = by_keywords()
    return model, lambda: 3 * model(**batch)["loss"]


def with_buffers() -> Case:
    return nn.Sequential(*(Normed() for _ in range(3))), torch.randn(64, 16)


def llama() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train(), tokens_of(2, 16)


def llama_with_cache() -> Case:
    model, batch = llama()
    model.get_submodule("model").config.use_cache = True  # type: ignore[union-attr]
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :3] = 0
    return model, {**batch, "attention_mask": mask}


def gpt2_with_cache() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_head=2, n_layer=3, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    assert config.use_cache
    return transformers.GPT2LMHeadModel(config).train(), tokens_of(2, 16)


def tokens_of(*shape: int) -> dict[str, Tensor]:
    tokens = torch.randint(64, shape)
    return {"input_ids": tokens, "labels": tokens}


def one_block() -> Case:
    return Block(16, 0.1), torch.randn(64, 16)


CASES: dict[str, Callable[[], Case]] = {
    case.__name__: case
    for case in (
        small_gpt,
        sequential,
        two_kinds,
        twice,
        by_keywords,
        by_function,
        with_buffers,
        llama,
        llama_with_cache,
        gpt2_with_cache,
        one_block,
    )
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
ONCE = {name: case for name, case in CASES.items() if name not in ("twice", "gpt2_with_cache")}
every_case_once = pytest.mark.parametrize("case", ONCE.values(), ids=ONCE)
"""But for blocks that are called twice, and for two embeddings whose gradients are one tensor's:
what they hold is not predicted to the byte yet."""


def run(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if callable(batch):
        return batch()
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def step(model: nn.Module, batch: Any) -> list[Tensor | None]:
    if isinstance(batch, dict) and "input_ids" in batch:
        batch = {**batch, "use_cache": False}  # a cache alone changes the last bits of GPT-2
    return gradients(lambda: run(model, batch), model.parameters())[1]


def all_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(same_bits, left, right))


@cache
def profile_of(case: Callable[[], Case]) -> Profile:
    """The measured profile of a case, for the tests that want one and not its measuring."""
    torch.manual_seed(0)
    return rekindle.profile(*case())


@cache
def least(profile: Profile) -> int:
    return rekindle.frontier(profile, 2)[-1].peak


def fit_by(profile: Profile, model: nn.Module, batch: Any, budget: int) -> rekindle.Plan:
    """A fit that measures nothing anew: menus depend on times, and so a little on the weather."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rekindle._api.planning.profile", lambda *_, **__: profile)
        return rekindle.fit(model, batch, budget)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """All there is to see of a model is the same after."""

    def state() -> list[Any]:
        modules = dict(model.named_modules())
        hooks = [
            len(vars(m)[name]) for m in modules.values() for name in vars(m) if "_hooks" in name
        ]
        return [
            list(modules),
            list(map(id, modules.values())),
            [m.training for m in modules.values()],
            list(map(id, (*model.parameters(), *model.buffers()))),
            [p.requires_grad for p in model.parameters()],
            [p._version for p in model.parameters()],
            [id(p.grad) for p in model.parameters()],
            [id(vars(m).get("forward")) for m in modules.values()],
            hooks,
        ]

    def tensors() -> list[Tensor | None]:
        found = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        return [None if t is None else t.detach().clone() for t in found]

    before, values, rng = state(), tensors(), torch.get_rng_state()
    yield
    assert state() == before
    assert all_same(values, tensors())
    assert torch.equal(torch.get_rng_state(), rng)
