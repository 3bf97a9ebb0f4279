"""`apply` on models and arguments out of the ordinary: right, or an error that changes nothing."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from rekindle import policies
from rekindle.modules.forward import forward_of
from tests.toys import Block, Mlp, Stack, assert_same_step

SPILL = rekindle.offload(tier="disk", quota=1.0, min_bytes=1)
WAYS: dict[str, Any] = {
    "recompute": "recompute",
    "spill": SPILL,
    "policy": policies.keep_matmuls,
}
every_way = pytest.mark.parametrize("what", WAYS.values(), ids=WAYS)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 8)), requires_grad=True)


def with_fates(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if forward_of(module) is not None]


def seen_of(run: Callable[[], Any]) -> rekindle.Observation:
    with rekindle.observe() as seen:
        run()
    return seen


def replays_of(model: nn.Module) -> int:
    return seen_of(lambda: model(leaf()).sum().backward()).total.replays


def assert_as_plain(model: nn.Module, what: Any, run: Callable[[], Any], *leaves: Tensor) -> None:
    """A step is that of the plain model, which is the same one before `apply`."""

    def with_fates() -> Any:
        rekindle.apply(model, what)
        return run()

    assert_same_step(run, with_fates, [*leaves, *model.parameters()])


def assert_refused(error: type[Exception], match: str, model: Any, what: Any) -> None:
    """The error says so, and whatever was applied before is as it was."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [dict(vars(module)) for module in modules]
    with pytest.raises(error, match=match):
        rekindle.apply(model, what)
    assert [vars(module) for module in modules] == before


# Shared modules


class Twice(nn.Module):
    """One block under two names, and called under each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@every_way
def test_a_module_under_two_names_has_the_plain_gradients(what: Any) -> None:
    model, x = Twice(), leaf()
    assert_as_plain(model, {"first": what}, lambda: model(x), x)


@pytest.mark.parametrize("pattern", ["first", "second", "*"])
def test_a_module_under_two_names_is_a_region_in_each_call(pattern: str) -> None:
    model = Twice()
    rekindle.apply(model, {pattern: "recompute"})
    seen = seen_of(lambda: model(leaf()).sum().backward())
    assert (seen.total.forwards, seen.total.replays) == (2, 2)


def test_a_module_under_two_names_is_shown_once() -> None:
    applied = rekindle.apply(Twice(), {"*": "recompute"})
    assert str(applied).count("Block") == 1


def test_two_fates_for_one_module_are_refused() -> None:
    what = {"first": "recompute", "second": "offload"}
    assert_refused(
        ValueError, "first and second are one module.*recompute and offload", Twice(), what
    )


def test_one_fate_given_twice_to_one_module_is_fine() -> None:
    model = Twice()
    rekindle.apply(model, {"first": "recompute", "second": "recompute"})
    assert replays_of(model) == 2


def test_a_fate_of_a_shared_module_can_be_removed() -> None:
    model = Twice()
    rekindle.apply(model, {"*": "recompute"})
    rekindle.remove(model)
    assert "forward" not in vars(model.first)


class Lists(nn.Module):
    """Two lists of blocks that have one in common."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList([Block(), Block()])
        self.b = nn.ModuleList([self.a[0], Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.a, *self.b):
            x = block(x)
        return x


def test_a_block_in_two_lists_is_one_region_in_each_call() -> None:
    model = Lists()
    rekindle.apply(model, "recompute")
    assert replays_of(model) == 4


def test_a_block_in_two_lists_is_as_before_after_remove() -> None:
    model = Lists()
    rekindle.apply(model, "recompute")
    rekindle.remove(model)
    assert with_fates(model) == []
    assert all("forward" not in vars(module) for module in model.modules())


class OneMlp(nn.Module):
    """Two blocks that share their Mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.blocks[1].mlp = self.blocks[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


@every_way
def test_a_part_that_two_blocks_share_has_the_plain_gradients(what: Any) -> None:
    model, x = OneMlp(), leaf()
    fates = {"blocks.*": "recompute", "blocks.*.mlp": what}
    assert_as_plain(model, fates, lambda: model(x), x)


def test_a_part_that_two_blocks_share_has_its_fate_in_both() -> None:
    shared, apart = OneMlp(), OneMlp()
    apart.blocks[1].mlp = Mlp()
    fates = {"blocks.*": "recompute", "blocks.*.mlp": "keep"}
    found = []
    for model in (shared, apart):
        rekindle.apply(model, fates)
        found.append(seen_of(lambda model=model: model(leaf()).sum().backward()).total)  # type: ignore[misc]
    assert found[0] == found[1]


class Again(nn.Module):
    """Calls one block several times."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.block = Block(drop=0.3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.block(x)
        return x


@every_way
def test_a_module_called_several_times_has_the_plain_gradients(what: Any) -> None:
    model, x = Again(), leaf()
    assert_as_plain(model, {"block": what}, lambda: model(x), x)


def test_a_module_called_several_times_is_a_region_in_each_call() -> None:
    model = Again()
    rekindle.apply(model, {"block": "recompute"})
    assert replays_of(model) == 3


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        out = self.mlp(x)
        return self(out, depth - 1) if depth else out  # type: ignore[no-any-return]


@every_way
def test_a_module_that_calls_itself_has_the_plain_gradients(what: Any) -> None:
    model, x = Recursive(), leaf()
    assert_as_plain(model, {"": what}, lambda: model(x), x)


# Inputs and outputs


class Shaped(nn.Module):
    """Runs a function of its Mlp and of whatever it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.mlp, self.function = Mlp(), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.mlp, *args, **kwargs)


@every_way
def test_a_dict_as_input_has_the_plain_gradients(what: Any) -> None:
    model, x, y = Shaped(lambda mlp, batch: mlp(batch["x"]) * batch["more"][0]), leaf(), leaf()
    assert_as_plain(model, {"": what}, lambda: model({"x": x, "more": [y]}), x, y)


@every_way
def test_keyword_only_inputs_have_the_plain_gradients(what: Any) -> None:
    model, x, y = Shaped(lambda mlp, *, x, y: mlp(x) * y), leaf(), leaf()
    assert_as_plain(model, {"": what}, lambda: model(x=x, y=y), x, y)


@every_way
def test_no_inputs_at_all_have_the_plain_gradients(what: Any) -> None:
    x = torch.randn(2, 8)
    model = Shaped(lambda mlp: mlp(x))
    assert_as_plain(model, {"": what}, model)


NAMES = [
    *("function", "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop"),
    *("preserve_rng_state", "args", "kwargs", "module", "way", "forward", "name"),
]


@every_way
@pytest.mark.parametrize("name", NAMES)
def test_a_modules_own_keyword_may_have_any_name(name: str, what: Any) -> None:
    model, x, y = Shaped(lambda mlp, x, **given: mlp(x) * given[name]), leaf(), leaf()
    assert_as_plain(model, {"": what}, lambda: model(x, **{name: y}), x, y)


@pytest.mark.parametrize("given", [True, False, None, "values", 3], ids=str)
def test_a_value_for_a_modules_own_debug_reaches_it(given: Any) -> None:
    model = Shaped(lambda mlp, x, debug: (mlp(x), debug))
    rekindle.apply(model, {"": "recompute"})
    assert model(leaf(), debug=given)[1] is given


def test_an_input_is_held_whatever_the_name_of_its_keyword_is() -> None:
    found = []
    for name in ("debug", "other"):
        model = Shaped(lambda mlp, x, **given: mlp(x) * next(iter(given.values())))
        rekindle.apply(model, {"": "recompute"})
        given = {name: leaf() * 1}
        found.append(seen_of(lambda m=model, y=given: m(leaf(), **y).sum().backward()).total)  # type: ignore[misc]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["other", "debug"])
def test_a_keyword_whose_container_is_changed_after_forward_is_replayed_as_it_was(
    name: str,
) -> None:
    model, x, y = Shaped(lambda mlp, x, **given: mlp(x).exp() * given[name]["by"]), leaf(), leaf()

    def run() -> Tensor:
        batch = {"by": y}
        out: Tensor = model(x, **{name: batch})
        batch.clear()
        return out

    assert_as_plain(model, {"": "recompute"}, run, x, y)


@pytest.mark.parametrize("name", ["other", "debug"])
def test_a_keyword_that_is_changed_in_place_after_forward_is_told(name: str) -> None:
    model, x, y = Shaped(lambda mlp, x, **given: mlp(x).exp() * given[name].sin()), leaf(), leaf()
    rekindle.apply(model, {"": "recompute"})
    loss = model(x, **{name: y}).sum()
    with torch.no_grad():
        y.zero_()
    with pytest.raises(rekindle.CheckpointError, match="changed in place"):
        loss.backward()


@dataclass
class Output:
    hidden: Tensor
    parts: tuple[Tensor, ...]


class Pair(NamedTuple):
    hidden: Tensor
    gate: Tensor


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda mlp, x: (mlp(x), x.sin()), lambda out: out[0] * out[1]),
    "dict": (lambda mlp, x: {"a": [mlp(x)], "b": x.exp()}, lambda out: out["a"][0] * out["b"]),
    "named": (lambda mlp, x: Pair(mlp(x), x.sin()), lambda out: out.hidden * out.gate),
    "dataclass": (
        lambda mlp, x: Output(mlp(x), (x.sin(), x.cos())),
        lambda out: out.hidden * out.parts[0] * out.parts[1],
    ),
    "with others": (lambda mlp, x: (mlp(x), None, 3, "x"), lambda out: out[0] * out[2]),
    "its input": (lambda mlp, x: (x, mlp(x)), lambda out: out[0] * out[1]),
    "views": (lambda mlp, x: mlp(x).chunk(2), lambda out: out[0] * out[1]),
}


@every_way
@pytest.mark.parametrize(("function", "of"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_of_any_shape_has_the_plain_gradients(
    function: Callable[..., Any], of: Callable[[Any], Tensor], what: Any
) -> None:
    model, x = Shaped(function), leaf()
    assert_as_plain(model, {"": what}, lambda: of(model(x)), x)


@every_way
@pytest.mark.parametrize("name", ["tuple", "dict", "named", "dataclass"])
def test_an_output_keeps_its_type(name: str, what: Any) -> None:
    model, x = Shaped(OUTPUTS[name][0]), leaf()
    plain = type(model(x))
    rekindle.apply(model, {"": what})
    assert type(model(x)) is plain


def test_an_error_in_a_forward_is_the_users_own() -> None:
    def fails(mlp: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("mine")

    model = Shaped(fails)
    rekindle.apply(model, {"": "recompute"})
    with pytest.raises(KeyError, match="mine"):
        model(leaf())


def test_a_wrong_argument_is_told_as_by_the_plain_model() -> None:
    model = Stack(2)
    rekindle.apply(model, {"": "recompute"})
    with pytest.raises(TypeError, match=r"forward\(\) got an unexpected keyword argument 'nope'"):
        model(leaf(), nope=1)


# Modules that are checkpointed already


WRAPPERS = {
    "torch's": torch_wrappers.checkpoint_wrapper,
    "torch's offload": torch_wrappers.offload_wrapper,
    "ours": rekindle.checkpoint_wrapper,
    "our offload": rekindle.offload_wrapper,
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@every_wrapper
@pytest.mark.parametrize(
    "what", ["recompute", {"blocks.*": "recompute"}, {"": "recompute"}], ids=str
)
def test_a_model_with_wrapped_blocks_is_refused(wrap: Any, what: Any) -> None:
    model = Stack(2)
    rekindle.apply(model, {"blocks.0": "offload"})
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    assert_refused(ValueError, "Wrapper: unwrap it, or leave it out", model, what)


@every_wrapper
def test_a_block_beside_a_wrapped_one_has_its_fate(wrap: Any) -> None:
    model, x = Stack(2), leaf()
    model.blocks[1] = wrap(model.blocks[1])
    assert_as_plain(model, {"blocks.0": "recompute"}, lambda: model(x), x)


@every_wrapper
def test_a_wrapper_is_refused_itself(wrap: Any) -> None:
    assert_refused(ValueError, "contains or is in a", wrap(Block()), "recompute")


class Checkpointed(nn.Module):
    """As models of transformers were before layers knew of it: the model has the switch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = torch_checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


@pytest.mark.parametrize(
    "what", ["recompute", {"layers.*": "recompute"}, {"": "recompute"}], ids=str
)
def test_a_model_that_checkpoints_its_layers_itself_is_refused(what: Any) -> None:
    assert_refused(ValueError, "checkpointed by the model itself", Checkpointed(), what)


def test_a_model_that_will_checkpoint_itself_once_it_trains_is_refused() -> None:
    model = Checkpointed().eval()
    assert_refused(ValueError, "checkpointed by the model itself", model, {"": "recompute"})


def test_a_model_whose_own_checkpointing_is_off_has_its_fates() -> None:
    model = Checkpointed()
    model.gradient_checkpointing = False
    rekindle.apply(model, "recompute")
    assert replays_of(model) == 2


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.arange(8).reshape(2, 4)
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


LLAMA_FATES: dict[str, Any] = {
    "recompute": "recompute",
    "policy": policies.keep_matmuls_and_attention,
    "spill": SPILL,
    "by path": {"model.layers.*": "recompute", "model.layers.*.mlp": "keep", "lm_head": SPILL},
}


@pytest.mark.parametrize("what", LLAMA_FATES.values(), ids=LLAMA_FATES)
def test_a_model_of_transformers_has_the_plain_gradients(what: Any) -> None:
    model = llama()
    assert_as_plain(model, what, lambda: loss_of(model))


def test_every_layer_of_a_model_of_transformers_is_a_region() -> None:
    model = llama()
    rekindle.apply(model, "recompute")
    assert seen_of(lambda: loss_of(model).backward()).total.replays == 2


@pytest.mark.parametrize(
    "what",
    ["recompute", {"model.layers.0": "recompute"}, {"model.layers.*.mlp": "offload"}],
    ids=str,
)
def test_a_model_of_transformers_that_checkpoints_itself_is_refused(what: Any) -> None:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    assert_refused(ValueError, r"gradient_checkpointing_disable\(\) first", model, what)


def test_a_model_of_transformers_that_is_told_to_stop_has_its_fates() -> None:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    rekindle.apply(model, "recompute")
    assert seen_of(lambda: loss_of(model).backward()).total.replays == 2


# Patterns that name nothing


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("blocks.*.mpl", "blocks.*.mlp"),
        ("block.*", "blocks"),
        ("blokcs.0.norm", "blocks.0.norm"),
        ("layers.*.mlp", "blocks.*.mlp"),
    ],
)
def test_a_typo_is_told_with_what_may_be_meant(pattern: str, meant: str) -> None:
    model = Stack(2)
    rekindle.apply(model, "recompute")
    assert_refused(ValueError, r"Did you mean", model, {pattern: "offload"})
    with pytest.raises(ValueError, match=r"No module") as told:
        rekindle.apply(model, {pattern: "offload"})
    assert repr(pattern) in str(told.value)
    assert meant in str(told.value)


@pytest.mark.parametrize(
    "pattern", ["zzz", "blocks.9", "blocks.0.", ".blocks", "blocks..0", "Blocks.0", "mlp", " "]
)
def test_a_pattern_that_names_nothing_is_refused(pattern: str) -> None:
    assert_refused(ValueError, "No module of the model matches", Stack(2), {pattern: "recompute"})


def test_a_typo_beside_a_good_pattern_is_refused() -> None:
    what = {"blocks.*": "recompute", "blocks.*.mpl": "keep"}
    assert_refused(ValueError, r"blocks\.\*\.mpl", Stack(2), what)


def test_a_pattern_that_names_only_what_is_never_called_is_refused() -> None:
    """A list of modules has no forward: a fate for it alone would do nothing."""
    model = Stack(2)
    try:
        rekindle.apply(model, {"blocks": "recompute"})
    except ValueError:
        return
    assert replays_of(model) > 0


# Wrong types


@pytest.mark.parametrize("model", [None, 3, "model", nn.Linear, [nn.Linear(2, 2)], torch.relu])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"apply\(\) takes a model, but got"):
        rekindle.apply(model, "recompute")
    with pytest.raises(TypeError, match=r"remove\(\) takes a model, but got"):
        rekindle.remove(model)


@pytest.mark.parametrize("what", ["recomputed", "", "Recompute", "drop", "RECOMPUTE"])
@pytest.mark.parametrize("in_a_mapping", [False, True])
def test_an_unknown_fate_is_refused_with_the_known_ones(what: str, in_a_mapping: bool) -> None:
    model = Stack(2)
    rekindle.apply(model, "recompute")
    given: Any = {"blocks.*": what} if in_a_mapping else what
    assert_refused(ValueError, "keep.*recompute.*offload.*spill", model, given)


@pytest.mark.parametrize(
    "what",
    [
        *(None, True, 3, ["recompute"], ("blocks.*", "recompute"), {"recompute"}, nn.Linear(2, 2)),
        *(rekindle.offload, policies.keep, rekindle.CheckpointPolicy.MUST_SAVE),
        rekindle.noop_context_fn,
    ],
    ids=lambda what: getattr(what, "__name__", str(what)),
)
@pytest.mark.parametrize("in_a_mapping", [False, True])
def test_what_is_neither_strategy_nor_policy_is_refused(what: Any, in_a_mapping: bool) -> None:
    model = Stack(2)
    rekindle.apply(model, "recompute")
    given = {"blocks.*": what} if in_a_mapping else what
    assert_refused(TypeError, "A module is given a strategy", model, given)


@pytest.mark.parametrize("pattern", [0, None, ("blocks", 0), Stack])
def test_a_pattern_that_is_no_string_is_refused(pattern: Any) -> None:
    assert_refused(TypeError, "A pattern is a string", Stack(2), {pattern: "recompute"})


def test_apply_needs_to_be_told_what() -> None:
    with pytest.raises(TypeError, match="what"):
        rekindle.apply(Stack(2))  # type: ignore[call-arg]


# Models out of the ordinary


def test_a_model_without_parameters_is_applied_to() -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Sigmoid()), leaf()
    assert_as_plain(model, "recompute", lambda: model(x), x)


def test_a_model_without_modules_is_applied_to() -> None:
    model, x = nn.Tanh(), leaf()
    assert_as_plain(model, "recompute", lambda: model(x), x)


def test_an_empty_model_is_applied_to() -> None:
    model = nn.Sequential()
    x = leaf()
    rekindle.apply(model, "recompute")
    assert torch.equal(model(x), x)


def test_a_name_with_the_letters_of_a_pattern_can_be_named() -> None:
    model = nn.ModuleDict({"a[0]": Mlp(), "a0": Mlp()})
    rekindle.apply(model, {"a[[]0]": "recompute"})
    assert with_fates(model) == ["a[0]"]


def test_a_part_whose_name_has_the_letters_of_a_pattern_has_its_fate() -> None:
    parts = nn.ModuleDict({"a[0]": Mlp()})
    model = Shaped(lambda _, x: parts["a[0]"](x))
    model.parts = parts
    rekindle.apply(model, {"": "recompute", "parts.*": "keep"})
    seen = seen_of(lambda: model(leaf()).sum().backward())
    plain = Shaped(lambda mlp, x: mlp(x))
    rekindle.apply(plain, {"": "recompute", "mlp": "keep"})
    other = seen_of(lambda: plain(leaf()).sum().backward())
    assert seen.total.bytes_held == other.total.bytes_held


def test_a_module_that_contains_itself_is_applied_to() -> None:
    model = Mlp()
    vars(model)["_modules"]["down"].__dict__["parent"] = model  # no submodule, as people do it
    x = leaf()
    assert_as_plain(model, "recompute", lambda: model(x), x)


def test_a_model_on_the_meta_device_is_applied_to() -> None:
    with torch.device("meta"):
        model = Stack(2)
    rekindle.apply(model, "recompute")
    assert replays_of(model.to_empty(device="cpu")) == 2


def test_a_traced_module_is_applied_to() -> None:
    model, x = torch.fx.symbolic_trace(Mlp()), leaf()
    assert_as_plain(model, {"": "recompute"}, lambda: model(x), x)


def test_applying_does_not_change_what_it_is_given() -> None:
    what = {"blocks.*": "recompute", "**.mlp": "keep"}
    before = copy.copy(what)
    rekindle.apply(Stack(2), what)
    assert what == before
