"""`apply` and `remove`: what each fate does to a model, by module path, in exact counts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from benchmarks.decoder import SHAPES, Decoder
from rekindle import Counts, policies
from rekindle.modules.forward import forward_of
from rekindle.modules.strategy_spelling import Spelling
from tests.toys import Block, Mlp, Stack, assert_same_step

BLOCKS = 3
X = 2 * 8 * 4
"""The bytes of a block's input, as of its norm's output."""
HIDDEN = 2 * X
"""The bytes of what the Mlp makes in between, before GELU and after it."""
NORM = X + 2 * 8
"""Bytes that backward needs of what a norm makes: its result, means and deviations."""
SPILL = rekindle.offload(tier="disk", quota=1.0, min_bytes=1, derive=False)
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
    "small ones spilled": SPILL,
    "a policy": policies.keep_matmuls,
    "the model itself": {"": "recompute"},
    "every module": {"**": "recompute"},
    "every norm": {"**.norm": "recompute"},
    "keep in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "keep"},
    "offload in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "offload"},
    "spill in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "spill"},
    "options in recompute": {"blocks.*": "recompute", "blocks.*.mlp": SPILL},
    "policy in recompute": {"blocks.*": "recompute", "blocks.*.mlp": policies.keep_matmuls},
    "recompute in recompute": {"blocks.*": "recompute", "blocks.*.mlp": "recompute"},
    "recompute in spill": {"blocks.*": SPILL, "blocks.*.mlp": "recompute"},
    "recompute in keep": {"blocks.*": "keep", "blocks.*.mlp": "recompute"},
    "recompute in a policy": {"blocks.*": policies.keep(), "blocks.*.mlp": "recompute"},
    "policy in spill": {"blocks.*": SPILL, "blocks.*.mlp": policies.keep_matmuls},
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
        "blocks.1": SPILL,
        "blocks.2": policies.keep_matmuls,
        "blocks.*.mlp.up": "keep",
        "blocks.*.norm": "offload",
    },
}
every_way = pytest.mark.parametrize("what", WAYS.values(), ids=WAYS)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 8)), requires_grad=True)


def times(counts: Counts, count: int = BLOCKS) -> Counts:
    return sum([counts] * count, Counts())


def step(model: nn.Module, x: Tensor | None = None) -> rekindle.Observation:
    """The counts of one step."""
    with rekindle.observe() as seen:
        model(leaf() if x is None else x).sum().backward()
    return seen


def seen_with(what: Any, model: nn.Module | None = None) -> rekindle.Observation:
    model = model or Stack(BLOCKS)
    rekindle.apply(model, what)
    return step(model)


def total_with(what: Any, model: nn.Module | None = None) -> Counts:
    return seen_with(what, model).total


def with_fates(model: nn.Module) -> list[str]:
    """The paths of the modules whose forward is ours."""
    return [path for path, module in model.named_modules() if forward_of(module) is not None]


# Gradients


@every_way
def test_outputs_gradients_and_random_numbers_are_those_of_the_plain_model(what: Any) -> None:
    model, x = Stack(BLOCKS, drop=0.3), leaf()
    plain = copy.deepcopy(model)
    rekindle.apply(model, what)

    def run(this: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
        for parameter in this.parameters():
            parameter.grad = None
        out: Tensor = this(x)
        torch.autograd.backward(out.sum(), inputs=list(this.parameters()))
        return out, [p.grad for p in this.parameters()]

    for _ in range(2):  # the second step uses what was learnt in the first
        assert_same_step(lambda: run(plain), lambda: run(model), [x], backward=lambda _: None)


@every_way
def test_a_second_backward_gives_the_gradients_again(what: Any) -> None:
    model, x = Stack(BLOCKS), leaf()
    rekindle.apply(model, what)
    loss = model(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


@every_way
def test_a_decoder_with_attention_has_the_plain_gradients(what: Any) -> None:
    model = Decoder(SHAPES["tiny"], dtype=torch.float32)
    renamed = {
        key.replace("norm", "*_norm").replace("mlp.up", "mlp.gate"): value
        for key, value in what.items()
    } if isinstance(what, dict) else what  # fmt: skip
    if isinstance(renamed, dict):
        renamed.pop("blocks.2", None)
    plain = copy.deepcopy(model)
    rekindle.apply(model, renamed)
    x = model.shape.hidden_states(dtype=torch.float32).requires_grad_()
    assert_same_step(lambda: plain(x), lambda: model(x), [x])


# What each word does


def test_recompute_holds_a_blocks_input_and_replays_it_once() -> None:
    assert total_with("recompute") == times(PER_BLOCK["recompute"])


def test_keep_leaves_everything_to_autograd() -> None:
    model = Stack(BLOCKS)
    assert total_with("keep", model) == Counts()
    assert with_fates(model) == []


def test_offload_leaves_what_is_in_host_memory_where_it_is() -> None:
    seen = seen_with("offload")
    assert (seen.total, seen.offload.tensors_out, seen.spill.tensors_out) == (Counts(), 0, 0)


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_spill_sends_large_activations_to_disk() -> None:
    """Of the five of each chain of linear layers, of 1 MiB each, the last two stay."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    rekindle.apply(model, "spill")
    spilled = step(model, leaf(1024, 256)).spill
    assert (spilled.tensors_out, spilled.bytes_out) == (3, 3 * 2**20)
    assert (spilled.tensors_in, spilled.bytes_in) == (3, 3 * 2**20)


def test_spill_leaves_small_activations_where_they_are() -> None:
    assert seen_with("spill").spill.tensors_out == 0


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_offload_with_options_does_what_they_say(tmp_path: Path) -> None:
    option = rekindle.offload(tier="disk", directory=tmp_path, quota=1.0, min_bytes=HIDDEN)
    spilled = seen_with(option).spill
    assert spilled.bytes_out == spilled.tensors_out * HIDDEN > 0


def test_a_policy_decides_by_op_in_every_block() -> None:
    assert total_with(policies.keep_matmuls) == times(PER_BLOCK["matmuls kept"])


def test_a_model_without_blocks_is_one_region() -> None:
    assert total_with("recompute", Mlp()).forwards == 1


def test_counts_are_those_of_checkpointing_each_block_by_hand() -> None:
    model = Stack(BLOCKS)
    with rekindle.observe() as seen:
        model(leaf(), run=rekindle.checkpoint).sum().backward()
    assert total_with("recompute", model) == seen.total


def test_each_region_is_counted_under_the_name_of_its_class() -> None:
    assert [name.split(".")[0] for name in seen_with("recompute").regions] == ["Block"]


# Patterns


def test_a_mapping_gives_fates_to_the_modules_it_names_alone() -> None:
    assert total_with({"blocks.1": "recompute"}) == PER_BLOCK["recompute"]


def test_a_range_of_blocks_can_be_named() -> None:
    assert total_with({"blocks.[0-1]": "recompute"}) == times(PER_BLOCK["recompute"], 2)


def test_the_model_itself_is_the_empty_path() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, {"": "recompute"})
    assert with_fates(model) == [""]


def test_an_empty_mapping_gives_no_fates() -> None:
    model = Stack(BLOCKS)
    assert total_with({}, model) == Counts()
    assert with_fates(model) == []


def test_a_star_stands_for_one_part_of_a_path() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, {"*.*.mlp": "recompute"})
    assert with_fates(model) == [f"blocks.{i}.mlp" for i in range(BLOCKS)]


def test_a_star_within_a_part_stands_for_any_letters() -> None:
    model = Stack(1)
    rekindle.apply(model, {"bl*ks.0.?lp": "recompute"})
    assert with_fates(model) == ["blocks.0.mlp"]


def test_two_stars_stand_for_any_number_of_parts() -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block(), Mlp()))
    rekindle.apply(model, {"**.up": "recompute"})
    assert with_fates(model) == ["0.mlp.up", "1.0.mlp.up", "1.1.up"]


def test_two_stars_stand_for_no_part_too() -> None:
    model = Mlp()
    rekindle.apply(model, {"**.up": "recompute"})
    assert with_fates(model) == ["up"]


def test_two_stars_in_the_middle_stand_for_what_is_between() -> None:
    model = Stack(2)
    rekindle.apply(model, {"blocks.**.down": "recompute"})
    assert with_fates(model) == ["blocks.0.mlp.down", "blocks.1.mlp.down"]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("general", "specific"),
    [
        ("**", "blocks.1"),
        ("*.*", "blocks.1"),
        ("blocks.*", "blocks.1"),
        ("blocks.?", "blocks.1"),
        ("blocks.**", "blocks.1"),
        ("**.1", "blocks.1"),
        ("**", "blocks.[1]"),
        ("blocks.*", "blocks.[1]"),
        ("*.1", "b*.1"),
    ],
)
def test_the_most_specific_pattern_decides_whichever_comes_first(
    general: str, specific: str, order: int
) -> None:
    model = Stack(BLOCKS)
    given: list[tuple[str, Spelling]] = [(general, "keep"), (specific, "recompute")]
    rekindle.apply(model, dict(given[::order]))
    assert with_fates(model) == ["blocks.1"]


def test_a_block_can_be_left_out_by_a_more_specific_pattern() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.2": "keep"})
    assert counts == times(PER_BLOCK["recompute"], 2)


# A fate inside another


def test_what_is_kept_inside_a_recomputed_block_is_not_run_again() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.*.mlp": "keep"})
    assert counts == times(PER_BLOCK["the Mlp kept"])


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
@pytest.mark.parametrize("what", ["spill", SPILL, policies.spill()], ids=str)
def test_what_is_spilled_inside_a_recomputed_block_goes_and_comes_back(what: Spelling) -> None:
    """The Mlp's two of each block go, but for the last two of the step."""
    seen = seen_with({"blocks.*": "recompute", "blocks.*.mlp": what})
    sent = (2 * BLOCKS - 2, (2 * BLOCKS - 2) * HIDDEN)
    assert seen.total == times(PER_BLOCK["the Mlp spilled"])
    assert (seen.spill.tensors_out, seen.spill.bytes_out) == sent
    assert (seen.spill.tensors_in, seen.spill.bytes_in) == sent


def test_what_is_offloaded_inside_a_recomputed_block_is_not_run_again() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.*.mlp": "offload"})
    assert counts.ops_replayed == times(PER_BLOCK["the Mlp kept"]).ops_replayed


def test_a_policy_inside_a_recomputed_block_decides_for_its_part() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.*.mlp": policies.keep_matmuls})
    assert counts == times(PER_BLOCK["matmuls kept"])


def test_a_part_of_one_block_only_has_its_own_fate() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.1.mlp": "keep"})
    assert counts == times(PER_BLOCK["recompute"], 2) + PER_BLOCK["the Mlp kept"]


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_recomputed_inside_a_spilled_block_is_dropped_and_not_spilled() -> None:
    seen = seen_with({"blocks.*": SPILL, "blocks.*.mlp": "recompute"})
    assert seen.total.replays == BLOCKS
    assert seen.total.bytes_dropped == BLOCKS * 2 * HIDDEN
    held = BLOCKS * (X + NORM)
    assert 0 < seen.spill.bytes_out < held
    assert seen.spill.bytes_in == seen.spill.bytes_out


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_kept_inside_a_spilled_block_is_not_spilled() -> None:
    """The Mlp's are 2 * HIDDEN in each block, and its input is the norm's result."""
    what = {"blocks.*": SPILL, "blocks.*.mlp": "keep"}
    assert seen_with(what).spill.bytes_out <= BLOCKS * (X + NORM)


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_nothing_is_spilled_where_all_parts_of_a_spilled_model_are_kept() -> None:
    model = nn.Sequential(*[Mlp() for _ in range(4)])
    assert seen_with({"": SPILL, "*": "keep"}, model).spill.tensors_out == 0


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_spilled_inside_a_kept_block_is_spilled() -> None:
    model = nn.Sequential(*[nn.Sequential(Mlp(), Mlp(), Mlp()) for _ in range(2)])
    assert seen_with({"*": "keep", "*.*": SPILL}, model).spill.tensors_out > 0


def test_what_is_recomputed_inside_a_kept_block_is_recomputed() -> None:
    model = Stack(BLOCKS)
    counts = total_with({"blocks.*": "keep", "blocks.*.mlp": "recompute"}, model)
    assert (counts.replays, counts.bytes_dropped) == (BLOCKS, BLOCKS * 2 * HIDDEN)
    assert with_fates(model) == [f"blocks.{i}.mlp" for i in range(BLOCKS)]


@pytest.mark.parametrize("around", ["recompute", policies.keep()], ids=str)
def test_what_is_recomputed_inside_what_is_kept_inside_a_region_is_recomputed(
    around: Spelling,
) -> None:
    counts = total_with({"": around, "blocks.*": "keep", "blocks.*.mlp": "recompute"})
    assert counts.bytes_dropped == BLOCKS * 2 * HIDDEN
    assert counts.bytes_held < BLOCKS * (X + NORM) + 1


def test_what_is_kept_inside_two_recomputed_modules_is_kept() -> None:
    counts = total_with({"": "recompute", "blocks.*": "recompute", "blocks.*.mlp": "keep"})
    assert counts.bytes_held >= BLOCKS * 2 * HIDDEN


def test_recompute_inside_recompute_nests() -> None:
    counts = total_with({"": "recompute", "blocks.*": "recompute"})
    assert (counts.forwards, counts.replays) == (1 + BLOCKS, 1 + BLOCKS)
    assert (counts.activations_held, counts.bytes_held) == (1, X)


def test_what_a_parts_policy_does_not_speak_of_is_recomputed_whatever_is_around() -> None:
    """The most specific pattern decides, and that policy alone would recompute GELU."""
    counts = total_with({"": policies.keep(), "blocks.*.mlp": policies.keep_matmuls})
    other = total_with({"": policies.keep()})
    assert other.bytes_held - counts.bytes_held == BLOCKS * HIDDEN


class Named(nn.Module):
    """Has a norm, and so has its part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Mlp()
        self.part = nn.ModuleDict({"norm": Mlp()})

    def forward(self, x: Tensor) -> Tensor:
        return self.part["norm"](self.norm(x))  # type: ignore[no-any-return]


def test_a_part_is_not_taken_for_another_whose_path_ends_alike() -> None:
    counts = total_with({"": "recompute", "norm": "keep"}, Named())
    other = total_with({"": "recompute", "norm": "keep", "part.norm": "keep"}, Named())
    assert other.bytes_held - counts.bytes_held == 2 * HIDDEN


class Methods(nn.Module):
    """Its training step does not go through its forward, as with Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(BLOCKS)

    def training_step(self, x: Tensor) -> Tensor:
        out = x
        for block in self.stack.blocks:
            out = block(out)
        return out.sum()


def test_a_part_has_its_fate_however_the_block_around_it_is_called() -> None:
    model = Methods()
    rekindle.apply(model, {"stack.blocks.*": "recompute", "stack.blocks.*.mlp": "keep"})
    with rekindle.observe() as seen:
        model.training_step(leaf()).backward()
    assert seen.total == times(PER_BLOCK["the Mlp kept"])


def test_a_part_has_its_fate_where_the_model_is_a_part_of_another() -> None:
    model = nn.Sequential(Stack(BLOCKS))
    rekindle.apply(model[0], {"blocks.*": "recompute", "blocks.*.mlp": "keep"})
    assert step(model).total == times(PER_BLOCK["the Mlp kept"])


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_options_of_offload_inside_a_recomputed_block_count_or_are_refused() -> None:
    what: dict[str, Spelling] = {
        "blocks.*": "recompute",
        "blocks.*.mlp": rekindle.offload(tier="disk", min_bytes=2**30),
    }
    model = Stack(BLOCKS)
    try:
        rekindle.apply(model, what)
    except ValueError:
        return
    assert step(model).spill.tensors_out == 0


# Applying again, removing


@every_way
def test_removing_restores_the_variables_of_every_module(what: Any) -> None:
    model = Stack(BLOCKS)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    rekindle.apply(model, what)
    rekindle.remove(model)
    after = {path: vars(module) for path, module in model.named_modules()}
    assert after == before
    assert step(model).total == Counts()


@every_way
def test_applying_again_replaces_what_was_applied(what: Any) -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, what)
    assert total_with("recompute", model) == times(PER_BLOCK["recompute"])
    rekindle.remove(model)
    assert with_fates(model) == []


def test_applying_twice_is_as_applying_once() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, "recompute")
    assert total_with("recompute", model) == times(PER_BLOCK["recompute"])


def test_removing_what_was_never_applied_does_nothing() -> None:
    model = Stack(BLOCKS)
    before = [dict(vars(module)) for module in model.modules()]
    rekindle.remove(model)
    assert [vars(module) for module in model.modules()] == before


def test_removing_twice_does_no_harm() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, "recompute")
    rekindle.remove(model)
    rekindle.remove(model)
    assert with_fates(model) == []


def test_fates_can_be_removed_from_a_part() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, "recompute")
    rekindle.remove(model.blocks[0])
    assert step(model).total == times(PER_BLOCK["recompute"], 2)


def test_a_backward_after_remove_still_replays() -> None:
    model, x = Stack(BLOCKS), leaf()

    def removed() -> Tensor:
        rekindle.apply(model, {"blocks.*": "recompute", "blocks.*.mlp": "keep"})
        out: Tensor = model(x)
        rekindle.remove(model)
        return out

    assert_same_step(lambda: model(x), removed, [x, *model.parameters()])


def test_a_backward_after_another_apply_is_that_of_its_forward() -> None:
    model, x = Stack(BLOCKS), leaf()

    def changed() -> Tensor:
        rekindle.apply(model, "recompute")
        out: Tensor = model(x)
        rekindle.apply(model, SPILL)
        return out

    plain = copy.deepcopy(model)
    assert_same_step(lambda: plain(x), changed, [x])


# Printing


def shown(what: Any, model: nn.Module | None = None) -> list[str]:
    return str(rekindle.apply(model or Stack(BLOCKS), what)).splitlines()


def test_blocks_that_are_alike_are_one_line() -> None:
    assert shown("recompute") == ["Stack", "  blocks.0-2: 3 x Block: recompute"]


def test_a_fate_inside_another_is_indented_below_it() -> None:
    assert shown({"blocks.*": "recompute", "blocks.*.mlp": "keep"}) == [
        "Stack",
        "  blocks.0-2: 3 x Block: recompute",
        "    blocks.0-2.mlp: 3 x Mlp: keep",
    ]


def test_a_gap_in_the_numbers_is_shown() -> None:
    what = {"blocks.[0134]": "recompute", "blocks.2": "offload"}
    assert shown(what, Stack(5)) == [
        "Stack",
        "  blocks.0-1,3-4: 4 x Block: recompute",
        "  blocks.2: Block: offload",
    ]


def test_the_model_itself_is_called_so() -> None:
    assert shown({"": "recompute"}) == ["Stack", "  (itself): Stack: recompute"]


def test_a_policy_is_shown_as_its_code() -> None:
    assert shown({"blocks.0": policies.keep("aten::mm")})[1:] == [
        "  blocks.0: Block: keep('aten::mm')"
    ]


def test_what_is_applied_to_nothing_is_the_models_name() -> None:
    assert shown({}) == ["Stack"]


def test_its_repr_is_what_it_prints() -> None:
    applied = rekindle.apply(Stack(BLOCKS), "recompute")
    assert repr(applied) == str(applied)


def test_what_was_applied_can_be_compared() -> None:
    one, other = (rekindle.apply(Stack(BLOCKS), "recompute") for _ in range(2))
    assert one == other
    assert one != rekindle.apply(Stack(BLOCKS), "offload")
    assert hash(one) == hash(other)


def test_a_line_names_no_module_without_a_fate() -> None:
    """Two of the four parts: `0-1.0-1` would be all of them."""
    model = nn.Sequential(nn.Sequential(Mlp(), Mlp()), nn.Sequential(Mlp(), Mlp()))
    lines = shown({"0.1": "recompute", "1.0": "recompute"}, model)
    assert not any("0-1.0-1" in line for line in lines)


def test_a_part_is_shown_below_the_module_that_it_is_in() -> None:
    lines = shown({"blocks.0": "recompute", "blocks.1": "keep", "blocks.*.mlp": "offload"})
    assert lines == [
        "Stack",
        "  blocks.0: Block: recompute",
        "    blocks.0.mlp: Mlp: offload",
        "  blocks.1: Block: keep",
        "    blocks.1.mlp: Mlp: offload",
        "  blocks.2.mlp: Mlp: offload",
    ]
