"""`find_blocks`, and `blocks=`: which modules of a model are planned one by one."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.modules.apply_strategies import apply_strategies
from rekindle.planner.trace.find_blocks import find_blocks
from rekindle.planner.training_step import TrainingStep
from tests.toys import Block, Mlp, Stack, same_bits

pytest.importorskip("scipy")

DIM = 8


def x() -> Tensor:
    return torch.randn(16, DIM, generator=torch.Generator().manual_seed(0), requires_grad=True)


def found(model: nn.Module, batch: Any = None) -> list[str]:
    return list(find_blocks(TrainingStep(model, x() if batch is None else batch)))


def planned(profile: rekindle.Profile) -> list[str]:
    return [path for path, _ in profile.order]


def stage(depth: int, *others: nn.Module) -> nn.Module:
    return nn.Sequential(*[Block(DIM) for _ in range(depth)], *others)


class Experts(nn.Module):
    """Blocks that are all given the same input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(DIM) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


class Residual(nn.Module):
    """Blocks in a chain whose links are ops outside of them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(DIM) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Glue(nn.Module):
    """Small blocks, and many ops between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            for _ in range(20):
                x = x.sin()
        return x


class Shared(nn.Module):
    """One block that is called many times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Block(DIM)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(9):
            x = self.layer(x)
        return x


class Around(nn.Module):
    """A stem, layers and a head."""

    def __init__(self, stem: int, layers: int, head: int) -> None:
        super().__init__()
        self.stem, self.head = Mlp(DIM, stem), Mlp(DIM, head)
        self.layers = nn.ModuleList(Block(DIM) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pyramid(nn.Module):
    """Parts that do not repeat, of several sizes, and one without bytes to speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Mlp(DIM, 64), Block(DIM), Mlp(DIM, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.middle(self.down(x))) + x


def test_large_stages_are_cut_into_their_layers() -> None:
    model = nn.Sequential(stage(2), stage(3))
    assert found(model) == ["0.0", "0.1", "1.0", "1.1", "1.2"]


def test_a_small_stage_stays_whole() -> None:
    model = nn.Sequential(stage(20), stage(2))
    assert found(model) == [*(f"0.{i}" for i in range(20)), "1"]


def test_stages_in_stages_are_cut_as_far_as_they_are_large() -> None:
    model = nn.Sequential(*[nn.Sequential(stage(2), stage(2)) for _ in range(2)])
    assert found(model) == [f"{i}.{j}.{k}" for i in (0, 1) for j in (0, 1) for k in (0, 1)]


def test_what_is_in_a_stage_beside_its_layers_is_a_block_if_it_is_worth_it() -> None:
    model = nn.Sequential(stage(4, Mlp(DIM, 16)), stage(2))
    assert found(model) == ["0.0", "0.1", "0.2", "0.3", "0.4", "1.0", "1.1"]


def test_experts_of_a_layer_are_no_blocks() -> None:
    assert found(nn.Sequential(Experts(4), Experts(4))) == ["0", "1"]


def test_a_chain_may_have_ops_as_its_links() -> None:
    assert found(nn.Sequential(Residual(2), Residual(2))) == [
        "0.layers.0",
        "0.layers.1",
        "1.layers.0",
        "1.layers.1",
    ]


def test_a_stage_whose_layers_make_few_of_its_bytes_stays_whole() -> None:
    assert found(nn.Sequential(Glue(), Glue())) == ["0", "1"]


def test_stem_and_head_are_blocks_if_they_make_many_bytes() -> None:
    layers = [f"layers.{i}" for i in range(4)]
    assert found(Around(32, 4, 32)) == ["stem", "head", *layers]
    assert found(Around(1, 4, 32)) == ["head", *layers]


def test_a_model_without_layers_that_repeat_is_cut_by_its_tree_of_modules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="rekindle"):
        assert found(Pyramid()) == ["down", "middle", "up"]
    assert caplog.messages == [
        "Pyramid has no layers that repeat: it is planned as 3 blocks, by its tree of modules"
    ]


def test_a_block_that_is_called_many_times_is_one_block() -> None:
    assert found(Shared()) == ["layer"]
    profile = rekindle.profile(Shared(), x())
    assert planned(profile) == ["layer"] * 9


def test_a_model_of_lone_layers_is_one_block() -> None:
    assert found(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))) == [""]


def test_a_model_whose_only_part_is_within_it_is_one_block() -> None:
    assert found(Block(DIM)) == [""]


def test_wrappers_change_no_block() -> None:
    model = nn.Sequential(stage(2), stage(2))
    assert found(nn.DataParallel(model)) == found(model)


def test_a_step_that_cannot_run_without_gradients_has_the_blocks_that_repeat() -> None:
    model = nn.Sequential(stage(2), stage(2))

    def penalized() -> Tensor:
        given = x()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        return slope.square().sum()

    assert found(model, penalized) == ["0", "1"]


def test_an_error_of_the_model_is_not_swallowed() -> None:
    model = nn.Sequential(stage(2), nn.Linear(DIM + 1, 1))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        rekindle.profile(model, x())


def test_a_model_of_compiled_parts_is_found_in_other_parts() -> None:
    model = Around(32, 2, 32)
    model.head.compile(backend="eager")
    assert found(model) == ["stem", "layers.0", "layers.1"]


def test_finding_leaves_no_hooks() -> None:
    model = nn.Sequential(stage(2), stage(2))
    found(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class BatchNormBlock(nn.Module):
    """Convolution, batch norm and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


def test_batch_norm_is_recomputed_without_a_second_update_of_its_statistics() -> None:
    def step(is_recomputed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[BatchNormBlock() for _ in range(2)])
        if is_recomputed:
            apply_strategies(model, "recompute")
        model(torch.randn(2, 4, 16)).sum().backward()
        return [*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain, recomputed = step(is_recomputed=False), step(is_recomputed=True)
    assert len(plain) == 14
    assert all(map(same_bits, plain, recomputed))
    assert plain[2].item() == 1  # batches seen


NAMED = ("blocks.*", Block, ["blocks.0", "blocks.[12]"], [Block])


@pytest.mark.parametrize("blocks", NAMED)
def test_blocks_are_named_by_patterns_and_classes(blocks: Any) -> None:
    profile = rekindle.profile(Stack(3, DIM), x(), blocks=blocks)
    assert planned(profile) == ["blocks.0", "blocks.1", "blocks.2"]


def test_parts_of_layers_can_be_named() -> None:
    model = Stack(3, DIM)
    plan = rekindle.fit(model, x(), "1GiB", blocks="blocks.*.mlp")
    assert [path for path, _, _ in plan.blocks] == [f"blocks.{i}.mlp" for i in range(3)]
    assert plan.left_out == ()


def test_a_plan_of_named_blocks_leaves_others_as_they_are(tmp_path: Any) -> None:
    model = Stack(4, DIM)
    profile = rekindle.profile(model, x(), blocks=["blocks.0", "blocks.1"])
    plan = rekindle.fit(model, x(), profile.recompute_peak, profile=profile)
    assert plan.left_out == ("blocks.2", "blocks.3")
    rekindle.remove(model)
    plan.save(tmp_path / "plan.json")
    applied = rekindle.apply(model, rekindle.Plan.load(tmp_path / "plan.json"))
    assert not {"blocks.2", "blocks.3"} & {entry.path for entry in applied.entries}


def test_named_blocks_are_those_of_a_larger_call_too() -> None:
    model = Stack(3, DIM)
    rekindle.fit(model, x(), "1GiB", blocks="blocks.*.mlp")
    model(torch.cat([x(), x()])).sum().backward()
    plan = rekindle.plan_of(model)
    assert plan is not None
    assert plan.inputs == ((32, DIM),)
    assert [path for path, _, _ in plan.blocks] == [f"blocks.{i}.mlp" for i in range(3)]


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ("blocks", ValueError, r"'blocks' names a list of modules.*Did you mean 'blocks\.\*'"),
        ("layers.*", ValueError, "No module of the model matches 'layers"),
        (nn.Conv2d, ValueError, "No module of the model is a Conv2d"),
        ([Block, Mlp], ValueError, "names 'blocks.0' and 'blocks.0.mlp', which is inside"),
        ([], ValueError, "names no module"),
        ([3], TypeError, "takes patterns of paths and classes of modules, but got 3"),
    ],
)
def test_blocks_that_make_no_sense_are_refused(
    blocks: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rekindle.profile(Stack(3, DIM), x(), blocks=blocks)


def test_blocks_are_not_given_along_with_a_profile() -> None:
    model = Stack(3, DIM)
    profile = rekindle.profile(model, x())
    with pytest.raises(ValueError, match="blocks= is for the profile"):
        rekindle.fit(model, x(), "1GiB", profile=profile, blocks=Block)
