"""Arguments of any kind reach a region and its replay."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.regions.recompute.calls import assert_same_as_plain, leaf
from tests.toys import Block, Mlp, assert_same_step, gradients, same_bits


@dataclasses.dataclass
class Batch:
    """An object of the user's own: no pytree, no container."""

    hidden: Tensor
    scale: float = 2.0


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


# What goes in


def test_keyword_arguments_reach_the_region_and_its_replay() -> None:
    x, y = leaf(3), leaf(3)

    def region(x: Tensor, *, other: Tensor, power: int = 2) -> Tensor:
        return (x * other.sin()) ** power

    assert_same_as_plain(region, [x, y], x, other=y, power=3)


def test_the_same_argument_may_be_given_twice() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda a, b: (a * b).sin() * b, [x], x, x)


def test_tensors_in_nested_lists_tuples_and_dicts_get_gradients() -> None:
    a, b, c = leaf(3), leaf(3), leaf(3)

    def region(tree: dict[str, Any]) -> Tensor:
        first, (second, rest) = tree["list"]
        return (first * second.sin() * rest["deep"].cos()).exp()

    assert_same_as_plain(region, [a, b, c], {"list": [a, (b, {"deep": c})], "other": None})


def test_a_custom_object_as_argument_works() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda batch: (batch.hidden * batch.scale).sin().sin(), [x], Batch(x))


def test_a_named_tuple_as_argument_works() -> None:
    x, y = leaf(3), leaf(3)
    assert_same_as_plain(lambda p: (p.first * p.second).sin() * p.first, [x, y], Pair(x, y))


def test_non_tensor_and_none_arguments_reach_the_replay() -> None:
    x = leaf(3)

    def region(x: Tensor, mask: Tensor | None, dim: int, kind: torch.dtype, how: str) -> Tensor:
        assert mask is None
        return getattr(x.to(kind).sin(), how)(dim).sin()

    assert_same_as_plain(region, [x], x, None, 0, torch.float64, "sum")


def test_integer_and_bool_tensor_arguments_work() -> None:
    table, index, mask = leaf(5, 3), torch.tensor([0, 3, 3]), torch.tensor([True, False, True])

    def region(table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        return (table[index].sin() * mask).sin()

    assert_same_as_plain(region, [table], table, index, mask)


def test_a_region_without_arguments_works() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda: x.sin().sin(), [x])


def test_frozen_inputs_leave_gradients_to_the_parameters() -> None:
    """Field note 16: inputs that do not require grad, with trainable parameters."""
    model, x = Block(), torch.randn(2, 8)
    assert_same_as_plain(model, list(model.parameters()), x)


def test_parameters_reached_through_a_closure_get_gradients() -> None:
    model, scale, x = Mlp(), nn.Parameter(torch.randn(8)), torch.randn(2, 8)
    assert_same_as_plain(lambda x: model(x) * scale.sin(), [scale, *model.parameters()], x)


def test_an_activation_reached_through_a_closure_passes_gradients_on() -> None:
    x, y = leaf(3), leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        outside = x.exp()
        return run(lambda y: (y * outside).sin().sin(), y)

    assert_same_step(lambda: step(lambda f, *a: f(*a)), lambda: step(rekindle.checkpoint), [x, y])


@pytest.mark.parametrize("training", [True, False])
def test_a_module_in_either_mode_runs_as_plain(training: bool) -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(8), Mlp(drop=0.5)).train(training), leaf(4, 8)
    with torch.no_grad():
        model[0].running_mean.fill_(0.5)
    before = {name: b.clone() for name, b in model.named_buffers()}
    _, plain, _ = gradients(lambda: model(x), [x, *model.parameters()])
    after = {name: b.clone() for name, b in model.named_buffers()}
    model.load_state_dict(before, strict=False)
    _, ours, _ = gradients(lambda: rekindle.checkpoint(model, x), [x, *model.parameters()])
    assert all(map(same_bits, plain, ours))
    assert all(same_bits(b, after[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("how", ["positional", "keyword", "list", "dict"])
def test_a_module_passed_as_argument_updates_its_buffers_once(how: str) -> None:
    norm, x = nn.BatchNorm1d(3), leaf(4, 3)
    calls: dict[str, Callable[[], Tensor]] = {
        "positional": lambda: rekindle.checkpoint(lambda x, m: m(x).sin(), x, norm),
        "keyword": lambda: rekindle.checkpoint(lambda x, m: m(x).sin(), x, m=norm),
        "list": lambda: rekindle.checkpoint(lambda x, m: m[0](x).sin(), x, [norm]),
        "dict": lambda: rekindle.checkpoint(lambda x, m: m["m"](x).sin(), x, {"m": norm}),
    }
    calls[how]().sum().backward()
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_a_list_that_the_region_appends_to_is_appended_to_once(kind: type) -> None:
    x, log = leaf(3), kind()

    def region(x: Tensor, log: Any) -> Tensor:
        log.append("called")
        return x.sin().sin()

    rekindle.checkpoint(region, x, log).sum().backward()
    assert list(log) == ["called"]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.defaultdict])
def test_a_dict_that_the_region_empties_is_full_again_in_replay(kind: type) -> None:
    x = leaf(3)

    def region(tensors: Any) -> Tensor:
        return tensors.pop("x").sin().sin()

    def fresh() -> Any:
        tensors = kind()
        tensors["x"] = x
        return tensors

    assert_same_step(lambda: region(fresh()), lambda: rekindle.checkpoint(region, fresh()), [x])


def test_a_list_that_is_changed_after_the_call_does_not_change_the_replay() -> None:
    x, y = leaf(3), leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        tensors = [x, y]
        out = run(lambda t: (t[0] * t[1].sin()).sin(), tensors)
        tensors.reverse()
        tensors.pop()
        return out

    assert_same_step(lambda: step(lambda f, *a: f(*a)), lambda: step(rekindle.checkpoint), [x, y])


@pytest.mark.parametrize("how", ["positional", "keyword", "nested"])
def test_a_generator_as_argument_draws_the_same_numbers_in_replay(how: str) -> None:
    x = leaf(64)

    def region(x: Tensor, source: Any) -> Tensor:
        source = source[0] if isinstance(source, list) else source
        return (x * torch.rand(64, generator=source)).sin()

    def step(run: Callable[..., Tensor]) -> Tensor:
        source = torch.Generator().manual_seed(7)
        if how == "keyword":
            return run(region, x, source=source)
        return run(region, x, [source] if how == "nested" else source)

    assert_same_step(
        lambda: step(lambda f, *a, **k: f(*a, **k)), lambda: step(rekindle.checkpoint), [x]
    )


def test_a_generator_as_argument_ends_a_step_where_the_plain_run_leaves_it() -> None:
    source = torch.Generator().manual_seed(7)
    x = leaf(64)
    rekindle.checkpoint(
        lambda x, source: (x * torch.rand(64, generator=source)).sin(), x, source
    ).sum().backward()
    plain = torch.Generator().manual_seed(7)
    torch.rand(64, generator=plain)
    assert torch.equal(source.get_state(), plain.get_state())


def test_a_list_given_twice_is_one_list_in_replay_too() -> None:
    x = leaf(3)

    def region(filled: list[Tensor], read: list[Tensor]) -> Tensor:
        filled.append(filled[0].exp())
        return read[0].sin() * read[1].sin()

    def step(run: Callable[..., Tensor]) -> Tensor:
        tensors = [x]
        return run(region, tensors, tensors)

    assert_same_step(lambda: step(lambda f, *a: f(*a)), lambda: step(rekindle.checkpoint), [x])


def test_an_attribute_set_on_a_tensor_argument_is_there_in_replay() -> None:
    x = leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        hidden = x * 2
        hidden.scale = 3.0  # type: ignore[attr-defined]
        return run(lambda h: (h * h.scale).sin().sin(), hidden)

    assert_same_step(lambda: step(lambda f, *a: f(*a)), lambda: step(rekindle.checkpoint), [x])


def test_an_inference_tensor_that_no_op_saves_may_be_an_argument() -> None:
    w = leaf(3)
    with torch.inference_mode():
        frozen = torch.randn(3)
    assert_same_as_plain(lambda frozen: (w + frozen).sin().sin(), [w], frozen)


def test_an_argument_that_wants_a_gradient_only_after_the_call_is_replayed_as_it_was() -> None:
    """Contrived: with one more tensor that requires grad a replay saves more, in other places."""
    x = leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        other = torch.full((3,), 2.0)
        out = run(lambda x, other: (x * other).sin() * 3, x, other)
        other.requires_grad_()
        return out

    assert_same_step(lambda: step(lambda f, *a: f(*a)), lambda: step(rekindle.checkpoint), [x])


def test_arguments_that_do_and_do_not_want_gradients_may_be_mixed_in_any_order() -> None:
    a, b = leaf(3), leaf(3)
    frozen = [torch.randn(3) for _ in range(3)]

    def region(x: Tensor, tree: list[Any], *, y: Tensor, z: Tensor) -> Tensor:
        for other in (tree[0], tree[1]["w"], y, z):
            x = (x * other).sin()
        return x

    assert_same_as_plain(region, [a, b], frozen[0], [frozen[1], {"w": a}], y=frozen[2], z=b)


def test_a_parameter_unfrozen_before_backward_never_gives_wrong_gradients() -> None:
    """The replay saves more than the forward did, in other places: right, or an error."""
    x = leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        w = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        out = run(lambda x: (x * w).sin() * 3, x)
        w.requires_grad_()
        return out

    _, plain, _ = gradients(lambda: step(lambda f, *a: f(*a)), [x])
    try:
        _, ours, _ = gradients(lambda: step(rekindle.checkpoint), [x])
    except rekindle.CheckpointError:
        return
    assert all(map(same_bits, plain, ours))
