"""`profile` and `fit` on whole models: within the budget, same gradients, nothing else changed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rekindle
from examples import demo
from rekindle._api import planning
from rekindle.modules.forward import forward_of
from rekindle.planner.plan_for_budget import plan_by
from rekindle.planner.timeline import simulate
from rekindle.planner.types import Profile
from rekindle.strategy import Keep, Recompute, SavedIndices, Selective
from tests.toys import Block, Mlp, Stack, gradients, same_bits

pytest.importorskip("scipy")

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


@pytest.mark.parametrize("case", [small_gpt, two_kinds, with_buffers, by_keywords])
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_plan_gives_the_gradients_of_a_plain_step(
    case: Callable[[], Case], data: st.DataObject
) -> None:
    profile = profile_of(case)
    options = [
        data.draw(st.sampled_from(profile.candidates(i)), label=path)
        for i, (path, _) in enumerate(profile.order)
    ]
    plan = plan_by(profile, 0, options, simulate(profile, options), 0.0)
    model, batch = case()
    plain = step(model, batch)
    rekindle.apply(model, plan)
    assert all_same(plain, step(model, batch))


@every_case
def test_a_model_fits_its_budget(case: Callable[[], Case]) -> None:
    model, batch = case()
    profile = profile_of(case)
    budget = (least(profile) + rekindle.frontier(profile, 1)[0].peak) // 2
    plan = fit_by(profile, model, batch, budget)
    assert plan.budget == budget
    assert plan.predicted_peak <= budget
    assert plan.measured_peak is not None
    assert plan.measured_peak <= budget


@every_case_once
def test_a_model_fits_the_least_budget_there_is(case: Callable[[], Case]) -> None:
    model, batch = case()
    profile = profile_of(case)
    plan = fit_by(profile, model, batch, least(profile))
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


@every_case_once
def test_a_model_that_fits_has_the_gradients_it_had(case: Callable[[], Case]) -> None:
    model, batch = case()
    plain = step(model, batch)
    profile = profile_of(case)
    fit_by(profile, model, batch, least(profile))
    assert all_same(plain, step(model, batch))
    rekindle.remove(model)
    assert all_same(plain, step(model, batch))


@every_case
def test_a_profile_leaves_all_as_it_was(case: Callable[[], Case]) -> None:
    model, batch = case()
    with unchanged(model):
        rekindle.profile(model, batch)


@every_case
def test_a_profile_leaves_gradients_that_were_there(case: Callable[[], Case]) -> None:
    model, batch = case()
    step(model, batch)
    with unchanged(model):
        rekindle.profile(model, batch)


def test_a_profile_leaves_buffers_that_a_forward_replaces() -> None:
    class Counting(Stack):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__(2, 16)
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: Tensor, run: Any = None) -> Tensor:
            self.steps = self.steps + 1
            return super().forward(x)

    model, x = Counting(), torch.randn(8, 16)
    with unchanged(model):
        rekindle.profile(model, x)


def test_a_model_that_an_optimizer_steps_in_backward_is_refused() -> None:
    model = Stack(2, 16)
    model.blocks[0].norm.weight.register_post_accumulate_grad_hook(lambda p: p.data.add_(1))
    with unchanged(model), pytest.raises(ValueError, match="such as an optimizer's"):
        rekindle.profile(model, torch.ones(8, 16))


def test_a_profile_leaves_the_state_of_the_optimizer() -> None:
    model, batch = sequential()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    rekindle.profile(model, batch, optimizer=optimizer)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, values in before["state"].items():
        assert all(same_bits(value, after["state"][index][key]) for key, value in values.items())


def test_a_profile_leaves_an_optimizer_without_state_without_state() -> None:
    model, batch = sequential()
    optimizer = torch.optim.AdamW(model.parameters())
    rekindle.profile(model, batch, optimizer=optimizer)
    assert not optimizer.state


def test_a_profile_that_fails_leaves_all_as_it_was() -> None:
    model, too_narrow = Stack(2, 16), torch.randn(8, 5)
    step(model, torch.randn(8, 16))
    rekindle.apply(model, {"blocks.0": "recompute"})
    with unchanged(model), pytest.raises(RuntimeError):
        rekindle.profile(model, too_narrow)


def test_a_fit_that_fails_leaves_all_as_it_was() -> None:
    model, batch = sequential()
    rekindle.apply(model, {"1": "recompute"})
    with unchanged(model), pytest.raises(rekindle.BudgetError):
        rekindle.fit(model, batch, 100)


def test_a_fit_changes_nothing_but_forwards() -> None:
    model, batch = with_buffers()
    plan = None
    with unchanged(model):
        plan = rekindle.fit(model, batch, "80%")
        rekindle.remove(model)
    assert plan is not None


@pytest.mark.parametrize("budget", ["1MiB", "0.5 MiB", "600KB", 700_000], ids=str)
def test_a_budget_may_be_bytes(budget: int | str) -> None:
    model, batch = Stack(4, 16), torch.randn(512, 16)
    plan = rekindle.fit(model, batch, budget)
    known = {"1MiB": 2**20, "0.5 MiB": 2**19, "600KB": 600_000}
    assert plan.budget == known.get(str(budget), budget)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


@pytest.mark.parametrize("share", [100, 70, 50])
def test_a_budget_may_be_a_share_of_activations(share: int) -> None:
    model, batch = Stack(6, 16), torch.randn(512, 16)
    profile = rekindle.profile(model, batch)
    plan = rekindle.fit(model, batch, f"{share}%")
    activations = rekindle.solve(profile, "100%").plain_peak - profile.static_bytes
    assert plan.budget == profile.static_bytes + int(share / 100 * activations)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


def test_with_room_for_all_nothing_is_recomputed() -> None:
    model, batch = sequential()
    rekindle.fit(model, batch, "1GiB")
    with rekindle.observe() as seen:
        step(model, batch)
    assert seen.total.replays == 0


def test_to_keep_all_is_never_more_than_the_whole_peak() -> None:
    for case in (sequential, by_keywords, two_kinds):
        model, batch = case()
        plan = rekindle.fit(model, batch, "100%")
        assert {type(option.strategy) for _, _, option in plan.blocks} <= {Keep, Selective}


def test_a_tight_budget_takes_less_memory_than_a_plain_step() -> None:
    model, batch = Stack(6, 16), torch.randn(512, 16)
    plain = rekindle.fit(model, batch, "100%")
    tight = rekindle.fit(model, batch, "45%")
    assert plain.measured_peak is not None
    assert tight.measured_peak is not None
    assert tight.measured_peak < 0.55 * plain.measured_peak


def test_a_profile_that_is_given_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(4, 32), torch.randn(64, 32)
    profile = rekindle.profile(model, x)
    monkeypatch.setattr(planning, "profile_model", None)
    plans = [rekindle.fit(model, x, share, profile=profile) for share in ("90%", "60%")]
    assert all(plan.measured_peak <= plan.budget for plan in plans)  # type: ignore[operator]
    assert plans[1].budget < plans[0].budget
    assert rekindle.plan_of(model) is plans[1]


@pytest.mark.parametrize(
    ("model", "batch", "match"),
    [
        (Mlp(8), torch.randn(4, 8), "is of a Stack, but the model is a Mlp"),
        (
            Stack(2),
            torch.randn(6, 8),
            r"is of a batch float32\[4, 8\], but the batch is float32\[6, 8\]",
        ),
    ],
)
def test_a_profile_of_something_else_is_refused(
    model: nn.Module, batch: Tensor, match: str
) -> None:
    profile = rekindle.profile(Stack(2), torch.randn(4, 8))
    with pytest.raises(ValueError, match=match):
        rekindle.fit(model, batch, "60%", profile=profile)


def test_with_a_profile_the_state_of_the_optimizer_counts_too() -> None:
    model, x = Stack(3, 16), torch.randn(32, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = rekindle.profile(model, x)
    state = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    without = rekindle.fit(model, x, "1GiB", profile=profile)
    counted = rekindle.fit(model, x, "1GiB", profile=profile, optimizer=optimizer)
    assert counted.predicted_peak == without.predicted_peak + state
    again = rekindle.profile(model, x, optimizer=optimizer)
    both = rekindle.fit(model, x, "1GiB", profile=again, optimizer=optimizer)
    assert both.predicted_peak == counted.predicted_peak


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(TypeError, match="profile should be a Profile, but got dict"):
        rekindle.fit(Stack(2), torch.randn(4, 8), "60%", profile={})  # type: ignore[arg-type]


def test_what_one_op_gives_back_is_an_option_and_holds_exactly_that_much_less() -> None:
    model = nn.Sequential(*[Mlp(16, 64) for _ in range(2)])
    (block,) = rekindle.profile(model, torch.randn(32, 16, requires_grad=True)).blocks
    keep = next(option for option in block.candidates if option.strategy == Keep())
    derive = next(
        option for option in block.candidates if isinstance(option.strategy, SavedIndices)
    )
    assert derive.recomputed_names == ("gelu",)
    assert keep.bytes_held - derive.bytes_held == 32 * 64 * 4


def test_a_second_fit_replaces_the_first() -> None:
    model, batch = Stack(4, 16, 0.1), torch.randn(512, 16)
    plain = step(model, batch)
    first = rekindle.fit(model, batch, "50%")
    second = rekindle.fit(model, batch, "100%")
    assert second.plain_peak <= first.plain_peak  # measured, and predicted
    assert second.keeps_all
    assert second.budget > first.budget
    assert all_same(plain, step(model, batch))
    rekindle.remove(model)
    assert all(forward_of(module) is None for module in model.modules())


def test_a_model_that_has_fates_is_measured_without_them() -> None:
    model, batch = Stack(4, 16), torch.randn(512, 16)
    plain = rekindle.profile(model, batch)
    rekindle.apply(model, "recompute")
    with unchanged(model):
        again = rekindle.profile(model, batch)
    assert again.static_bytes == plain.static_bytes
    assert again.rest_peak == plain.rest_peak
    for strategy in (Keep(), Recompute()):
        held = [
            next(o.bytes_held for o in p.candidates(0) if o.strategy == strategy)
            for p in (plain, again)
        ]
        assert held[0] == held[1]


def test_fates_outside_the_blocks_are_gone_after_a_fit() -> None:
    model, batch = by_keywords()
    rekindle.apply(model, {"head": "recompute"})
    rekindle.fit(model, batch, "100%")
    assert forward_of(model.get_submodule("head")) is None


def test_gradients_add_up_over_micro_batches_as_without_a_plan() -> None:
    model, batch = Language(), torch.randint(40, (3, 2, 64))
    micro = [{"words": words, "labels": labels} for words, labels in batch]

    def accumulated() -> list[Tensor | None]:
        model.zero_grad()
        torch.manual_seed(0)
        for part in micro:
            model(**part)["loss"].backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    plain = accumulated()
    rekindle.fit(model, micro[0], "70%")
    assert all_same(plain, accumulated())


class Linears(nn.Module):
    """A block whose result has the type that autocast gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(16, 64, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.mlp(x))


@pytest.mark.parametrize("block", [Linears, lambda: Block(16, 0.1)], ids=["bf16", "mixed"])
def test_a_step_with_autocast_inside_fits(block: Callable[[], nn.Module]) -> None:
    model, x = nn.Sequential(*(block() for _ in range(4))), torch.randn(256, 16)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    plain = step(model, loss)
    plan = rekindle.fit(model, loss, "85%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert all_same(plain, step(model, loss))


def test_autocast_inside_a_step_halves_what_is_held() -> None:
    model, x = nn.Sequential(*(Linears() for _ in range(4))), torch.randn(256, 16)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    held = [
        next(
            o.bytes_held
            for o in rekindle.profile(model, batch).candidates(3)
            if o.strategy == Keep()
        )
        for batch in (x, loss)
    ]
    assert held[1] <= 0.7 * held[0]


def test_a_fit_inside_autocast_gives_the_gradients_of_a_plain_step() -> None:
    model, x = nn.Sequential(*(Linears() for _ in range(4))), torch.randn(256, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = step(model, x)
        rekindle.fit(model, x, "85%")
        assert all_same(plain, step(model, x))


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int]] = {
    "SGD": (torch.optim.SGD, 0),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, momentum=0.9), 1),
    "AdamW": (torch.optim.AdamW, 2),
    "Adam with amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    "RMSprop": (torch.optim.RMSprop, 1),
    "RMSprop with all": (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
    "Adagrad": (torch.optim.Adagrad, 1),
    "Adadelta": (torch.optim.Adadelta, 2),
}
every_optimizer = pytest.mark.parametrize(("build", "copies"), OPTIMIZERS.values(), ids=OPTIMIZERS)


@every_optimizer
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "used"])
def test_the_state_of_an_optimizer_is_part_of_what_is_always_there(
    build: Callable[..., torch.optim.Optimizer], copies: int, stepped: bool
) -> None:
    model, batch = Stack(2, 16), torch.randn(8, 16)
    bare = rekindle.profile(model, batch).static_bytes
    optimizer = build(model.parameters())
    if stepped:
        step(model, batch)
        optimizer.step()
    parameters = sum(p.nbytes for p in model.parameters())
    counters = 4 * len(list(model.parameters()))  # how many steps were taken, a number each
    static = rekindle.profile(model, batch, optimizer=optimizer).static_bytes
    assert bare + copies * parameters <= static <= bare + copies * parameters + counters


def test_what_is_always_there_is_parameters_gradients_buffers_and_the_batch() -> None:
    model, batch = with_buffers()
    model.get_submodule("0").requires_grad_(False)
    parameters = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    buffers = sum(b.nbytes for b in model.buffers())
    found = rekindle.profile(model, batch).static_bytes
    assert found == parameters + trained + buffers + batch.nbytes


def test_a_step_that_fits_with_an_optimizer_trains_as_without_a_plan() -> None:
    def trained(budget: str | None) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = Stack(4, 16, 0.1), torch.randn(256, 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if budget:
            rekindle.fit(model, x, budget, optimizer=optimizer)
        for number in range(3):
            torch.manual_seed(number)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all_same(trained(None), trained("60%"))


def test_a_block_that_is_run_twice_has_one_option() -> None:
    model, batch = twice()
    profile = rekindle.profile(model, batch)
    for point in rekindle.frontier(profile, 5):
        chosen: dict[str, set[Any]] = {}
        for path, _, option in point.plan.blocks:
            chosen.setdefault(path, set()).add(option)
        assert all(len(options) == 1 for options in chosen.values())


def test_blocks_that_learn_and_blocks_that_do_not_are_told_apart() -> None:
    model = Stack(4, 16)
    model.blocks[1:3].requires_grad_(False)
    profile = rekindle.profile(model, torch.randn(64, 16).requires_grad_())
    kinds = [index for _, index in profile.order]
    assert kinds[0] == kinds[3]
    assert kinds[1] == kinds[2]
    assert kinds[0] != kinds[1]


def test_a_model_whose_first_blocks_are_frozen_fits() -> None:
    model, x = Stack(6, 16), torch.randn(512, 16)
    model.blocks[:3].requires_grad_(False)
    plain = step(model, x)
    plan = rekindle.fit(model, x, "70%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert all_same(plain, step(model, x))


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
        rekindle.profile(nn.ReLU(), torch.randn(4))


def test_a_model_that_learns_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
        rekindle.fit(Stack(2).requires_grad_(False), torch.randn(4, 8), "50%")


def test_a_step_whose_result_needs_no_gradient_is_refused() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="requires no gradient"):
        rekindle.profile(Stack(2), torch.randn(4, 8))


@pytest.mark.parametrize("model", ["a model", None, Stack], ids=["text", "None", "a class"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="takes a model"):
        rekindle.fit(model, torch.randn(4, 8), "50%")


def test_a_function_that_does_not_run_the_model_is_refused() -> None:
    other = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="block"):
        rekindle.fit(Stack(2), lambda: other(torch.randn(2, 4)).sum(), "50%")


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer"):
        rekindle.profile(Stack(2), torch.randn(4, 8), optimizer="AdamW")


@pytest.mark.parametrize("budget", ["0%", "-5%", "%", "half", "4GX", "", -1])
def test_a_budget_that_makes_no_sense_is_refused_before_anything_runs(budget: int | str) -> None:
    ran: list[int] = []

    def loss() -> Tensor:
        ran.append(1)
        return model(torch.randn(4, 8)).sum()  # type: ignore[no-any-return]

    model = Stack(2)
    with pytest.raises(ValueError, match="budget"):
        rekindle.fit(model, loss, budget)
    assert not ran


@pytest.mark.parametrize("budget", [None, 0.5, True, [1]], ids=str)
def test_a_budget_of_another_type_is_refused(budget: Any) -> None:
    with pytest.raises(TypeError, match="budget"):
        rekindle.fit(Stack(2), torch.randn(4, 8), budget)


def test_a_budget_below_what_is_always_there_is_refused_with_both() -> None:
    with pytest.raises(rekindle.BudgetError, match=r"No plan fits into 100 B\. The least that"):
        rekindle.fit(Stack(2), torch.randn(4, 8), 100)


def test_a_refused_budget_names_one_that_fits() -> None:
    model, batch = Stack(4, 16), torch.randn(512, 16)
    profile = rekindle.profile(model, batch)  # another may have other options, by its times
    with pytest.raises(rekindle.BudgetError) as refused:
        rekindle.fit(model, batch, 100, profile=profile)
    named = str(refused.value).split("The least that works is ")[1].split(",")[0]
    plan = rekindle.fit(model, batch, named, profile=profile)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


def test_a_plan_of_a_fit_can_be_applied_to_another_model_of_the_class() -> None:
    model, batch = Stack(4, 16, 0.1), torch.randn(256, 16)
    plan = rekindle.fit(model, batch, "60%")
    other = copy.deepcopy(model)
    rekindle.remove(other)
    plain = step(other, batch)
    rekindle.apply(other, replace(plan, measured_peak=None))
    assert all_same(plain, step(other, batch))


@pytest.mark.parametrize("case", [llama_with_cache, gpt2_with_cache])
def test_a_model_that_fits_keeps_no_cache_while_it_trains(case: Callable[[], Case]) -> None:
    model, batch = case()
    assert model(**batch).past_key_values is not None
    plain = step(model, batch)
    rekindle.fit(model, batch, "80%")
    assert all_same(plain, step(model, batch))
    assert model(**batch).past_key_values is None
    assert model(**batch, use_cache=True).past_key_values is None
    model.eval()
    assert model(**batch).past_key_values is not None
    rekindle.remove(model)
    assert model.train()(**batch).past_key_values is not None
    assert not any(module._forward_pre_hooks for module in model.modules())
