"""`apply` changes no module, name, key, class or signature; and everything else still works."""

import copy
import functools
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize

import rekindle
from rekindle import policies
from rekindle.modules.forward import forward_of
from tests.toys import Block, Mlp, Stack, assert_same_step, gradients, same_bits

BLOCKS = 2
SPILL = rekindle.offload(tier="disk", quota=1.0, min_bytes=1)
WAYS: dict[str, Any] = {
    "recompute": "recompute",
    "spill": SPILL,
    "policy": policies.keep_matmuls,
    "nested": {"blocks.*": "recompute", "blocks.*.mlp": "keep"},
}
every_way = pytest.mark.parametrize("what", WAYS.values(), ids=WAYS)
regions = pytest.mark.parametrize("what", ["recompute", WAYS["nested"]], ids=["plain", "nested"])


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 8)), requires_grad=True)


def applied(what: Any = "recompute", **options: Any) -> Stack:
    model = Stack(BLOCKS, **options)
    rekindle.apply(model, what)
    return model


def replays_in(run: Callable[[], Any]) -> int:
    with rekindle.observe() as seen:
        run()
    return seen.total.replays


def with_fates(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if forward_of(module) is not None]


def assert_as_plain(model: nn.Module, *args: Any, leaves: list[Tensor] | None = None) -> None:
    """A step of the model is that of a copy without fates; their parameters are shared."""
    plain = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    rekindle.remove(plain)
    assert with_fates(plain) == []
    assert with_fates(model) != []
    leaves = [*(leaves or []), *model.parameters()]
    assert_same_step(lambda: plain(*args), lambda: model(*args), leaves)


# Names, keys, classes


@every_way
def test_names_of_modules_parameters_and_keys_are_unchanged(what: Any) -> None:
    model, plain = applied(what), Stack(BLOCKS)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())


@every_way
def test_every_module_is_the_same_object_of_the_same_class(what: Any) -> None:
    model = Stack(BLOCKS)
    before = [(module, type(module)) for module in model.modules()]
    rekindle.apply(model, what)
    after = [(module, type(module)) for module in model.modules()]
    assert all(a is b and c is d for (a, c), (b, d) in zip(before, after, strict=True))
    assert isinstance(model.blocks[0], Block)


@every_way
def test_a_model_prints_as_before(what: Any) -> None:
    assert repr(applied(what)) == repr(Stack(BLOCKS))


@every_way
def test_attributes_are_reached_and_set_as_before(what: Any) -> None:
    model = applied(what)
    block: Any = model.blocks[0]
    block.note = "mine"
    assert (block.note, block.mlp.drop, block.mlp.up.out_features) == ("mine", 0.0, 16)
    del block.note
    assert not hasattr(block, "note")


@every_way
def test_apply_adds_no_buffer_hook_or_module(what: Any) -> None:
    model, plain = applied(what), Stack(BLOCKS)
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert set(vars(one)) - set(vars(other)) <= {"forward"}
        hooks = [name for name in vars(other) if "hook" in name]
        assert [vars(one)[name] for name in hooks] == [vars(other)[name] for name in hooks]


def test_a_state_dict_of_a_plain_model_is_loaded() -> None:
    model, plain = applied(), Stack(BLOCKS)
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert_as_plain(model, leaf())


def test_a_plain_model_loads_the_state_dict() -> None:
    assert not Stack(BLOCKS).load_state_dict(applied().state_dict()).missing_keys


# The forward that stands there


class Told(nn.Module):
    """Has parts, and a forward with much to read."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, *, scale: float = 1.0, **rest: Any) -> Tensor:
        """Scales what the Mlp makes."""
        return self.mlp(x) * scale  # type: ignore[no-any-return]


@pytest.fixture
def told() -> Told:
    model = Told()
    rekindle.apply(model, "recompute")
    return model


def test_the_signature_of_forward_is_unchanged(told: Told) -> None:
    assert inspect.signature(told.forward) == inspect.signature(Told().forward)


@pytest.mark.parametrize(
    "name", ["__doc__", "__name__", "__qualname__", "__module__", "__code__", "__annotations__"]
)
def test_what_a_bound_forward_tells_of_itself_is_unchanged(told: Told, name: str) -> None:
    assert getattr(told.forward, name) == getattr(Told().forward, name)


def test_the_forward_is_bound_to_its_module(told: Told) -> None:
    assert told.forward.__self__ is told  # type: ignore[attr-defined]


def test_a_forward_can_be_wrapped_by_functools(told: Told) -> None:
    wrapped = functools.wraps(told.forward)(lambda *args, **kwargs: None)
    assert inspect.signature(wrapped) == inspect.signature(Told().forward)


def test_a_forward_called_by_hand_has_the_fate() -> None:
    model = applied()
    assert replays_in(lambda: model.forward(leaf()).sum().backward()) == BLOCKS


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, 8)

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin().exp()


def test_a_static_forward_works() -> None:
    model, x = Static(), leaf()
    rekindle.apply(model, "recompute")
    assert_same_step(lambda: Static.forward(x), lambda: model(x), [x])


class Instead(nn.Module):
    """Its forward is a method of an object, not a function."""

    forward = functools.partialmethod(lambda self, x, by: self.mlp(x) * by, by=2.0)

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()


def test_a_forward_that_is_a_partial_method_works() -> None:
    model, x = Instead(), leaf()
    rekindle.apply(model, "recompute")
    assert_same_step(lambda: model.mlp(x) * 2.0, lambda: model(x), [x, *model.parameters()])


# A forward of the instance's own


def twice(model: nn.Module) -> Callable[..., Any]:
    """A forward on the instance that gives twice what its class's gives."""
    forward = type(model).forward.__get__(model)

    def doubled(x: Tensor) -> Tensor:
        return 2 * forward(x)  # type: ignore[no-any-return]

    return doubled


def test_a_forward_of_the_instances_own_is_the_one_that_runs() -> None:
    model, x = Stack(BLOCKS), leaf()
    own = model.blocks[0].forward = twice(model.blocks[0])
    rekindle.apply(model, "recompute")
    assert_same_step(
        lambda: model.blocks[1].__class__.forward(model.blocks[1], own(x)),
        lambda: model(x),
        [x, *model.parameters()],
    )


def test_a_forward_of_the_instances_own_comes_back() -> None:
    model = Stack(BLOCKS)
    own = model.blocks[0].forward = twice(model.blocks[0])
    rekindle.apply(model, "recompute")
    rekindle.apply(model, SPILL)
    rekindle.remove(model)
    assert vars(model.blocks[0])["forward"] is own
    assert "forward" not in vars(model.blocks[1])


def wrapped_by_another(model: nn.Module) -> None:
    """What accelerate does to a model that it prepares."""
    forward = model.forward

    @functools.wraps(forward)
    def as_float(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).float()

    model.forward = as_float


def test_removing_takes_ours_out_of_a_forward_that_another_library_put_around_it() -> None:
    model = applied()
    wrapped_by_another(model.blocks[0])
    rekindle.remove(model)
    assert replays_in(lambda: model(leaf()).sum().backward()) == 0


def test_applying_again_under_what_another_library_put_around_is_as_once() -> None:
    model = applied()
    wrapped_by_another(model.blocks[0])
    rekindle.apply(model, "recompute")
    assert replays_in(lambda: model(leaf()).sum().backward()) == BLOCKS


# Copies


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def through_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


ways_to_copy = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, through_pickle, through_torch], ids=["deepcopy", "pickle", "save"]
)


@ways_to_copy
@every_way
def test_a_copy_has_the_fates_and_gradients_of_its_own(what: Any, duplicate: Any) -> None:
    model, x = applied(what), leaf()
    other = duplicate(model)
    assert with_fates(other) == with_fates(model)
    for parameter in other.parameters():
        parameter.data *= 2
    model_grads = gradients(lambda: model(x), model.parameters())[1]
    assert_as_plain(other, x)
    assert all(p.grad is not None for p in other.parameters())
    assert all(same_bits(p.grad, g) for p, g in zip(model.parameters(), model_grads, strict=True))


@ways_to_copy
def test_removing_from_a_copy_leaves_the_first_as_it_is(duplicate: Any) -> None:
    model = applied()
    rekindle.remove(duplicate(model))
    assert with_fates(model) == ["blocks.0", "blocks.1"]


@ways_to_copy
def test_removing_from_the_first_leaves_a_copy_as_it_is(duplicate: Any) -> None:
    model = applied()
    other = duplicate(model)
    rekindle.remove(model)
    assert replays_in(lambda: other(leaf()).sum().backward()) == BLOCKS


class Scaled(nn.Module):
    """Its scale is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale  # type: ignore[no-any-return]


def test_fates_can_be_removed_from_a_shallow_copy() -> None:
    model = Scaled()
    rekindle.apply(model, "recompute")
    other = copy.copy(model)
    rekindle.remove(other)
    assert "forward" not in vars(other)


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    """A parameter on a GPU must not wait for it."""
    gc.collect()
    gc.disable()
    try:
        model = applied()
        model(leaf()).sum().backward()
        dead = [weakref.ref(module) for module in model.modules()]
        del model
        assert [ref() for ref in dead] == [None] * len(dead)
    finally:
        gc.enable()


# Hooks


def hooked(model: nn.Module) -> list[Any]:
    """Every kind of hook on the first block; each call is noted."""
    block, calls = model.get_submodule("blocks.0"), []

    def note(kind: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            shapes = [type(arg).__name__ for arg in args]
            calls.append((kind, *shapes))

        return hook

    block.register_forward_pre_hook(note("before"))
    block.register_forward_pre_hook(note("before, with keywords"), with_kwargs=True)
    block.register_forward_hook(note("after"))
    block.register_forward_hook(note("after, with keywords"), with_kwargs=True)
    block.register_forward_hook(note("after, always"), always_call=True)
    block.register_full_backward_pre_hook(note("before backward"))
    block.register_full_backward_hook(note("after backward"))
    return calls


@every_way
def test_hooks_of_a_module_run_once_and_in_the_same_order(what: Any) -> None:
    found = []
    for model in (applied(what), Stack(BLOCKS)):
        calls = hooked(model)
        model(leaf()).sum().backward()
        found.append(calls)
    assert found[0] == found[1]
    assert len(found[0]) == 7


@every_way
def test_hooks_that_were_there_before_run_as_before(what: Any) -> None:
    model = Stack(BLOCKS)
    calls = hooked(model)
    rekindle.apply(model, what)
    model(leaf()).sum().backward()
    assert len(calls) == 7


@every_way
def test_hooks_that_change_inputs_outputs_and_gradients_do_so_as_before(what: Any) -> None:
    model, x = Stack(BLOCKS), leaf()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    block.register_forward_hook(lambda _, args, out: out * args[0])
    tripled: Any = lambda _, given, __: (given[0] * 3,)  # noqa: E731
    block.register_full_backward_hook(tripled)

    def run() -> tuple[Tensor, list[Tensor | None], Tensor]:
        return gradients(lambda: model(x), [x, *model.parameters()])

    _, plain, _ = run()
    rekindle.apply(model, what)
    _, found, _ = run()
    assert all(map(same_bits, plain, found))


@every_way
def test_global_hooks_run_once_for_a_module_with_a_fate(what: Any) -> None:
    model, calls = applied(what), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    with handle:
        model(leaf()).sum().backward()
    assert calls.count(model.blocks[0]) == 1


# Modes


@every_way
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_plain_forward(what: Any, mode: Any) -> None:
    model, x = applied(what), leaf()
    with mode(), rekindle.observe() as seen:
        out = model(x)
    rekindle.remove(model)
    assert torch.equal(out, model(x))
    assert not out.requires_grad
    assert (seen.total.forwards, seen.spill.tensors_out) == (0, 0)


@every_way
def test_eval_has_the_plain_outputs_and_gradients(what: Any) -> None:
    model = applied(what, drop=0.5)
    assert_as_plain(model.eval(), leaf())


@every_way
def test_a_switch_between_forward_and_backward_does_not_reach_the_replay(what: Any) -> None:
    model, x = applied(what, drop=0.5), leaf()

    def switched() -> Tensor:
        out: Tensor = model(x)
        model.eval()
        return out

    plain = copy.deepcopy(model)
    rekindle.remove(plain)
    assert_same_step(lambda: plain(x), switched, [x])


@every_way
def test_training_after_eval_is_as_before(what: Any) -> None:
    model = applied(what, drop=0.5)
    model.eval()(leaf())
    assert_as_plain(model.train(), leaf())


@every_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_moved_to_another_dtype_has_the_plain_gradients(what: Any, dtype: Any) -> None:
    model = applied(what).to(dtype)
    assert_as_plain(model, torch.randn(2, 8, dtype=dtype))


@every_way
def test_autocast_gives_the_plain_gradients(what: Any) -> None:
    model, x = applied(what), leaf()
    plain = copy.deepcopy(model)
    rekindle.remove(plain)

    def run(this: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return this(x)

    assert_same_step(lambda: run(plain), lambda: run(model), [x])


def test_frozen_blocks_pass_gradients_on() -> None:
    model, x = applied(), leaf()
    model.requires_grad_(False)
    plain = copy.deepcopy(model)
    rekindle.remove(plain)
    assert_same_step(lambda: plain(x), lambda: model(x), [x])


def test_batch_statistics_are_counted_once() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])
    plain = copy.deepcopy(model)
    rekindle.apply(model, "recompute")
    x = leaf()
    for this in (model, plain):
        this(x).sum().backward()
    assert all(map(torch.equal, model.buffers(), plain.buffers()))


# Other things people do to modules


@every_way
def test_functional_call_has_gradients_for_what_it_is_given(what: Any) -> None:
    model, x = applied(what), leaf()
    plain = copy.deepcopy(model)
    rekindle.remove(plain)
    given = {
        name: (parameter.detach() * 2).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    assert_same_step(
        lambda: functional_call(plain, given, (x,)),
        lambda: functional_call(model, given, (x,)),
        [x, *given.values()],
    )


@every_way
def test_per_sample_gradients_are_the_plain_ones(what: Any) -> None:
    model, x = applied(what), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    rekindle.remove(plain)

    def per_sample(this: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            return functional_call(this, parameters, (sample,)).sum()  # type: ignore[no-any-return]

        parameters = {n: p.detach() for n, p in this.named_parameters()}
        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)  # type: ignore[no-any-return]

    one, other = per_sample(plain), per_sample(model)
    assert all(torch.equal(one[name], other[name]) for name in one)


@every_way
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_modules_have_the_plain_gradients(what: Any, when: str) -> None:
    model = Stack(BLOCKS)
    if when == "after":
        rekindle.apply(model, what)
    parametrizations.weight_norm(model.get_submodule("blocks.0.mlp.up"))
    if when == "before":
        rekindle.apply(model, what)
    assert parametrize.is_parametrized(model.get_submodule("blocks.0.mlp.up"))
    x = leaf()
    leaves = [x, *model.parameters()]
    found = gradients(lambda: model(x), leaves)[1]
    rekindle.remove(model)
    assert all(map(same_bits, found, gradients(lambda: model(x), leaves)[1]))


def test_a_module_parametrized_after_apply_keeps_its_fate() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    rekindle.apply(model, {"0": "recompute"})
    parametrizations.weight_norm(model[0])
    assert replays_in(lambda: model(leaf()).sum().backward()) == 1
    rekindle.remove(model)
    assert "forward" not in vars(model[0])


@every_way
def test_tied_weights_have_the_plain_gradients(what: Any) -> None:
    model = Stack(BLOCKS)
    one, other = (model.get_submodule(f"blocks.{i}.mlp.up") for i in range(2))
    other.weight = one.weight
    rekindle.apply(model, what)
    assert_as_plain(model, leaf())


def test_a_lazy_module_becomes_what_it_is_to_be() -> None:
    model, x = nn.Sequential(nn.LazyLinear(8), nn.ReLU()), leaf()
    rekindle.apply(model, {"0": "recompute"})
    model(x)
    assert type(model[0]) is nn.Linear
    assert_as_plain(model, x)


@every_way
def test_a_submodule_replaced_after_apply_is_the_one_that_runs(what: Any) -> None:
    model, x = applied(what), leaf()
    model.blocks[0].mlp = Mlp()
    assert_as_plain(model, x)


def test_a_block_replaced_after_apply_has_no_fate() -> None:
    model = applied()
    model.blocks[0] = Block()
    assert replays_in(lambda: model(leaf()).sum().backward()) == BLOCKS - 1


def test_a_block_taken_to_another_model_takes_its_fate_along() -> None:
    model = applied()
    other = nn.Sequential(model.blocks[0])
    assert replays_in(lambda: other(leaf()).sum().backward()) == 1
    rekindle.remove(other)
    assert with_fates(model) == ["blocks.1"]


def test_a_part_can_be_applied_to_and_the_model_after_it() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model.blocks[0], {"mlp": "recompute"})
    assert with_fates(model) == ["blocks.0.mlp"]
    rekindle.apply(model, "recompute")
    assert with_fates(model) == ["blocks.0", "blocks.1"]


def test_a_part_can_be_applied_to_after_the_model() -> None:
    model = applied()
    rekindle.apply(model.blocks[0], {"mlp": "recompute"})
    assert with_fates(model) == ["blocks.0.mlp", "blocks.1"]
    assert_as_plain(model, leaf())


def test_optimizers_made_before_train_the_same_parameters() -> None:
    model = Stack(BLOCKS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    rekindle.apply(model, "recompute")
    model(leaf()).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


# Compiled


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, backend: str) -> Callable[..., Any]:
    """Compiled as one graph, or an error."""
    return torch.compile(model, backend=backend, fullgraph=True)


def assert_close(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
    leaves = [x, *model.parameters()]
    out, found, _ = gradients(lambda: run(x), leaves)
    rekindle.remove(model)
    torch.compiler.reset()
    plain_out, plain, _ = gradients(lambda: model(x), leaves)
    torch.testing.assert_close(out, plain_out)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("what", [WAYS[name] for name in ("recompute", "policy", "nested")])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_compiled_after_apply_is_one_graph_with_the_plain_gradients(what: Any) -> None:
    model = applied(what)
    assert_close(model, compiled(model, "eager"), leaf())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_backward_has_the_plain_gradients() -> None:
    model = applied()
    assert_close(model, compiled(model, "aot_eager"), leaf())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_recomputed_block_is_a_region_of_the_compiled_graph() -> None:
    model, graphs = applied(), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(model, backend=backend)(leaf())
    code = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("tag_activation_checkpoint" in target for target in code) == BLOCKS


@regions
@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_compiled_and_run_before_apply_has_the_plain_gradients_after(what: Any) -> None:
    model, x = Stack(BLOCKS), leaf()
    run = compiled(model, "eager")
    run(x).sum().backward()
    rekindle.apply(model, what)
    assert_close(model, run, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_compiled_and_run_before_apply_is_compiled_again_with_the_fates() -> None:
    model, graphs = Stack(BLOCKS), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(model, backend=backend)
    run(leaf())
    rekindle.apply(model, "recompute")
    run(leaf())
    rekindle.remove(model)
    run(leaf())
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    found = [sum("tag_activation_checkpoint" in name for name in names) for names in targets]
    assert found in ([0, BLOCKS], [0, BLOCKS, 0])


@pytest.mark.usefixtures("fresh_compiler")
def test_fates_can_be_applied_to_a_compiled_model() -> None:
    model, x = Stack(BLOCKS), leaf()
    run = compiled(model, "eager")
    rekindle.apply(run, "recompute")  # type: ignore[arg-type]
    assert with_fates(model) == ["blocks.0", "blocks.1"]
    assert_close(model, run, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_compiled_in_place_are_recomputed() -> None:
    model, x = Stack(BLOCKS), leaf()
    for block in model.blocks:
        block.compile(backend="eager")
    rekindle.apply(model, "recompute")
    assert_close(model, model, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_are_recomputed_as_a_whole() -> None:
    blocks: list[Any] = [torch.compile(Block(), backend="eager") for _ in range(2)]
    model, x = nn.Sequential(*blocks), leaf()
    rekindle.apply(model, "recompute")
    assert replays_in(lambda: model(x).sum().backward()) == 2
    assert_close(model, model, x)


def test_an_applied_model_is_exported() -> None:
    model, x = applied().eval(), leaf()
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
