"""What the tests of `apply` share: strategies of each kind, and steps that are counted."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import rekindle
from rekindle import Counts, policies
from rekindle.modules.forward import forward_of
from tests.toys import Mlp, Stack, assert_same_step, leaf

SPILL = rekindle.offload(tier="disk", quota=1.0, min_bytes=1)
KINDS: dict[str, Any] = {
    "recompute": "recompute",
    "spill": SPILL,
    "policy": policies.keep_matmuls,
}
NESTED = {"blocks.*": "recompute", "blocks.*.mlp": "keep"}
every_kind = pytest.mark.parametrize("what", KINDS.values(), ids=KINDS)
every_kind_and_nested = pytest.mark.parametrize(
    "what", [*KINDS.values(), NESTED], ids=[*KINDS, "nested"]
)

BLOCKS = 3
"""Blocks of a model whose counts are exact."""
X = 2 * 8 * 4
"""The bytes of a block's input, as of its norm's output."""
HIDDEN = 2 * X
"""The bytes of what the Mlp makes in between, before GELU and after it."""
NORM = X + 2 * 8
"""Bytes that backward needs of what a norm makes: its result, means and deviations."""
SPILL_ONLY = rekindle.offload(tier="disk", quota=1.0, min_bytes=1, derive=False)
PER_BLOCK = {
    "recompute": Counts(1, 1, 5, 1, X, 5, NORM + 2 * HIDDEN),
    "keep": Counts(),
    "the Mlp kept": Counts(1, 1, 3, 3, X + 2 * HIDDEN, 3, NORM),
    "the Mlp spilled": Counts(1, 1, 3, 1, X, 3, NORM),
    "matmuls kept": Counts(1, 1, 4, 2, X + HIDDEN, 4, NORM + HIDDEN),
}
WAYS: dict[str, Any] = {
    "keep": "keep",
    "recompute": "recompute",
    "offload": "offload",
    "spill": "spill",
    "small ones spilled": SPILL_ONLY,
    "a policy": policies.keep_matmuls,
    "the model itself": {"": "recompute"},
    "every module": {"**": "recompute"},
    "every norm": {"**.norm": "recompute"},
    "keep in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "keep"},
    "offload in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "offload"},
    "spill in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "spill"},
    "options in recompute": {"blocks.*": "recompute", "blocks.*.mlp": SPILL_ONLY},
    "policy in recompute": {"blocks.*": "recompute", "blocks.*.mlp": policies.keep_matmuls},
    "recompute in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "recompute"},
    "recompute in spill": {"blocks.*": SPILL_ONLY, "blocks.*.mlp": "recompute"},
    "recompute in keep": {"blocks.*": "keep", "blocks.*.mlp": "recompute"},
    "recompute in a policy": {"blocks.*": policies.keep(), "blocks.*.mlp": "recompute"},
    "policy in spill": {"blocks.*": SPILL_ONLY, "blocks.*.mlp": policies.keep_matmuls},
    "policy in a policy": {"": policies.keep(), "**.mlp": policies.keep_matmuls},
    "keep in recompute in recompute": {
        "": "recompute",
        "blocks.*": "recompute",
        "blocks.*.mlp": "keep",
    },
    "recompute in keep in recompute": {
        "": "recompute",
        "blocks.*": "keep",
        "blocks.*.mlp": "recompute",
    },
    "all of them": {
        "blocks.0": "recompute",
        "blocks.1": SPILL_ONLY,
        "blocks.2": policies.keep_matmuls,
        "blocks.*.mlp.up": "keep",
        "blocks.*.norm": "offload",
    },
}
every_way = pytest.mark.parametrize("what", WAYS.values(), ids=WAYS)


def times(counts: Counts, count: int = BLOCKS) -> Counts:
    return sum([counts] * count, Counts())


class Shaped(nn.Module):
    """Runs a function of its Mlp and of whatever it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.mlp, self.function = Mlp(), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.mlp, *args, **kwargs)


def applied(what: Any = "recompute", blocks: int = 2, **options: Any) -> Stack:
    """A model that runs by strategies."""
    model = Stack(blocks, **options)
    rekindle.apply(model, what)
    return model


def managed(model: nn.Module) -> list[str]:
    """The paths of the modules that run by a strategy."""
    return [path for path, module in model.named_modules() if forward_of(module) is not None]


def seen_of(run: Callable[[], Any]) -> rekindle.Observation:
    with rekindle.observe() as seen:
        run()
    return seen


def replays_in(run: Callable[[], Any]) -> int:
    return seen_of(run).total.replays


def replays_of(model: nn.Module) -> int:
    """The replays of one step."""
    return replays_in(lambda: model(leaf()).sum().backward())


def step(model: nn.Module, x: Tensor | None = None) -> rekindle.Observation:
    """The counts of one step."""
    return seen_of(lambda: model(leaf() if x is None else x).sum().backward())


def seen_with(what: Any, model: nn.Module | None = None) -> rekindle.Observation:
    model = model or Stack(BLOCKS)
    rekindle.apply(model, what)
    return step(model)


def total_with(what: Any, model: nn.Module | None = None) -> Counts:
    return seen_with(what, model).total


def assert_as_before(model: nn.Module, what: Any, run: Callable[[], Any], *leaves: Tensor) -> None:
    """A step with strategies is that of the same model before `apply`."""

    def with_strategies() -> Any:
        rekindle.apply(model, what)
        return run()

    assert_same_step(run, with_strategies, [*leaves, *model.parameters()])


def assert_as_plain(model: nn.Module, *args: Any, leaves: list[Tensor] | None = None) -> None:
    """A step of the model is that of a copy without strategies; their parameters are shared."""
    plain = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    rekindle.remove(plain)
    assert managed(plain) == []
    assert managed(model) != []
    leaves = [*(leaves or []), *model.parameters()]
    assert_same_step(lambda: plain(*args), lambda: model(*args), leaves)


def assert_refused(error: type[Exception], match: str, model: Any, what: Any) -> None:
    """The error says so, and whatever was applied before is as it was."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [dict(vars(module)) for module in modules]
    with pytest.raises(error, match=match):
        rekindle.apply(model, what)
    assert [vars(module) for module in modules] == before
