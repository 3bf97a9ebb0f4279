"""A wrapped module has the state, names and attributes of the module itself."""

import copy
import functools
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers

import rekindle
from rekindle import CheckpointImpl, checkpoint_wrapper, offload_wrapper
from tests.toys import Block, Mlp, assert_same_step, same_bits, same_state

WRAPPERS = {
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "no_reentrant": checkpoint_wrapper,
    "offload": offload_wrapper,
    "spill": functools.partial(offload_wrapper, tier="disk", quota="50%"),
    "both": lambda module: offload_wrapper(checkpoint_wrapper(module)),
    "torchs": torch_wrappers.checkpoint_wrapper,
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
ours = pytest.mark.parametrize("wrap", list(WRAPPERS.values())[:-1], ids=list(WRAPPERS)[:-1])


class Normed(nn.Module):
    """Parameters, buffers and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed() for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def wrapped(wrap: Any, deep: bool = False) -> Model:
    """A model whose layers are wrapped, and inside of them the Mlp's too."""
    model = Model()
    for i, layer in enumerate(model.layers):
        if deep:
            layer.mlp = wrap(layer.mlp)
        model.layers[i] = wrap(layer)
    return model


# State dicts


@every_wrapper
@pytest.mark.parametrize("deep", [False, True])
def test_the_keys_of_a_state_dict_are_those_of_the_plain_model(wrap: Any, deep: bool) -> None:
    assert list(wrapped(wrap, deep).state_dict()) == list(Model().state_dict())


@ours
def test_the_keys_of_a_wrappers_own_state_dict_are_those_of_the_module(wrap: Any) -> None:
    assert list(wrap(Normed()).state_dict()) == list(Normed().state_dict())


@ours
def test_a_prefix_of_the_callers_is_kept(wrap: Any) -> None:
    assert list(wrap(nn.Linear(2, 2)).state_dict(prefix="a.")) == ["a.weight", "a.bias"]


@every_wrapper
@pytest.mark.parametrize("deep", [False, True])
def test_a_wrapped_model_loads_the_state_of_a_plain_one(wrap: Any, deep: bool) -> None:
    plain, model = Model(), wrapped(wrap, deep)
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert same_state(plain, model)


@every_wrapper
@pytest.mark.parametrize("deep", [False, True])
def test_a_plain_model_loads_the_state_of_a_wrapped_one(wrap: Any, deep: bool) -> None:
    plain, model = Model(), wrapped(wrap, deep)
    assert str(plain.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert same_state(plain, model)


@ours
def test_a_model_wrapped_in_one_way_loads_the_state_of_one_wrapped_in_another(wrap: Any) -> None:
    model, other = wrapped(wrap), wrapped(torch_wrappers.checkpoint_wrapper, deep=True)
    model.load_state_dict(other.state_dict())
    assert same_state(model, other)


@ours
def test_a_state_can_be_assigned(wrap: Any) -> None:
    model, state = wrapped(wrap), Model().state_dict()
    model.load_state_dict(state, assign=True)
    loaded = model.layers[0].mlp.up.weight
    assert loaded.data_ptr() == state["layers.0.mlp.up.weight"].data_ptr()


@ours
def test_the_dict_that_is_loaded_is_left_as_it_was(wrap: Any) -> None:
    state = Model().state_dict()
    keys = list(state)
    wrapped(wrap).load_state_dict(state)
    assert list(state) == keys


@ours
def test_missing_and_unexpected_keys_have_the_names_of_the_state_dict(wrap: Any) -> None:
    state = Model().state_dict()
    state["layers.0.mlp.other"] = state.pop("layers.0.mlp.up.weight")
    found = wrapped(wrap, deep=True).load_state_dict(state, strict=False)
    assert found.missing_keys == ["layers.0.mlp.up.weight"]
    assert found.unexpected_keys == ["layers.0.mlp.other"]


@ours
def test_the_state_survives_a_file(wrap: Any) -> None:
    model, file = wrapped(wrap), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = Model()
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert same_state(plain, model)


@ours
def test_a_step_changes_the_state_as_in_a_plain_model(wrap: Any) -> None:
    """The statistics of BatchNorm among it."""
    plain, model, x = Model(), wrapped(wrap), torch.randn(4, 8, requires_grad=True)
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).sum().backward()
        optimizer.step()
    assert same_state(plain, model)


# Names


@every_wrapper
def test_the_names_of_a_wrappers_parameters_are_those_of_the_module(wrap: Any) -> None:
    module = Normed()
    wrapper = wrap(module)
    assert list(wrapper.named_parameters()) == list(module.named_parameters())
    assert [name for name, _ in wrapper.named_parameters("a", recurse=True)] == [
        f"a.{name}" for name, _ in module.named_parameters()
    ]


@ours
def test_the_names_of_a_wrappers_buffers_are_those_of_the_module(wrap: Any) -> None:
    module = Normed()
    names = [name for name, _ in wrap(module).named_buffers()]
    assert names == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


@ours
def test_names_of_wrapped_modules_inside_a_wrapped_one_are_unchanged_too(wrap: Any) -> None:
    block = Normed()
    names = [name for name, _ in block.named_parameters()]
    block.mlp = wrap(block.mlp)
    assert [name for name, _ in wrap(block).named_parameters()] == names


@every_wrapper
def test_from_above_the_wrapper_shows_in_the_names_of_parameters(wrap: Any) -> None:
    """As in torch: the tree of modules has another node."""
    model = nn.Sequential(wrap(nn.Linear(2, 2, bias=False)))
    (name,) = [name for name, _ in model.named_parameters()]
    assert name.replace("_checkpoint_wrapped_module.", "") == "0.weight" != name


@ours
def test_parts_are_found_by_the_names_of_the_plain_model(wrap: Any) -> None:
    model = wrapped(wrap)
    assert model.get_parameter("layers.0.mlp.up.weight") is model.layers[0].mlp.up.weight
    assert model.get_buffer("layers.1.norm.running_mean") is model.layers[1].norm.running_mean
    assert isinstance(model.get_submodule("layers.0.mlp"), Mlp)


# Attributes and items


@every_wrapper
def test_attributes_of_the_module_are_those_of_the_wrapper(wrap: Any) -> None:
    module = Mlp(drop=0.25)
    module.note = "a note"
    wrapper = wrap(module)
    assert (wrapper.drop, wrapper.note) == (0.25, "a note")
    assert wrapper.up is module.up


@every_wrapper
def test_items_of_the_module_are_those_of_the_wrapper(wrap: Any) -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    wrapper = wrap(layers)
    assert wrapper[0] is layers[0]
    assert wrapper[-1] is layers[2]
    assert list(wrapper[1:]) == list(layers[1:])
    assert list(wrapper) == list(layers)


@ours
def test_items_of_a_dict_of_modules_are_those_of_the_wrapper(wrap: Any) -> None:
    layers = nn.ModuleDict({"a": nn.ReLU()})
    assert wrap(layers)["a"] is layers["a"]


@ours
def test_a_module_without_items_has_none_in_a_wrapper(wrap: Any) -> None:
    with pytest.raises(TypeError, match="subscriptable"):
        wrap(nn.Linear(2, 2))[0]


@ours
def test_an_attribute_that_nobody_has_is_an_error_of_the_modules(wrap: Any) -> None:
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'bogus'"):
        wrap(nn.Linear(2, 2)).bogus  # noqa: B018


def test_asking_a_wrapper_that_is_not_made_yet_ends() -> None:
    """Contrived: what unpickling may do."""
    empty = rekindle.CheckpointWrapper.__new__(rekindle.CheckpointWrapper)
    with pytest.raises(AttributeError):
        empty.bogus  # noqa: B018


@every_wrapper
def test_the_module_is_found_under_torchs_name(wrap: Any) -> None:
    module = Mlp()
    found = wrap(module)._checkpoint_wrapped_module
    assert module in (found, getattr(found, "_checkpoint_wrapped_module", None))


def test_the_variant_and_the_function_are_found_under_torchs_names() -> None:
    wrapper = checkpoint_wrapper(Mlp(), preserve_rng_state=False)
    assert wrapper.checkpoint_impl is CheckpointImpl.NO_REENTRANT
    assert wrapper.checkpoint_fn.func is rekindle.checkpoint
    assert wrapper.checkpoint_fn.keywords == {"use_reentrant": False, "preserve_rng_state": False}


# Copies


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled, saved])
@ours
def test_a_copy_trains_as_the_original(wrap: Any, clone: Any) -> None:
    block, x = Block(drop=0.3), torch.randn(4, 8, requires_grad=True)
    wrapper = wrap(block)
    other = clone(wrapper)
    assert type(other) is type(wrapper)
    assert_same_step(lambda: wrapper(x), lambda: other(x), [x])
    for a, b in zip(wrapper.parameters(), other.parameters(), strict=True):
        assert a is not b
        assert same_bits(a.grad, b.grad) or a.grad is None


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled, saved])
@ours
def test_the_state_of_a_copy_is_that_of_the_original(wrap: Any, clone: Any) -> None:
    wrapper = wrap(Normed())
    other = clone(wrapper)
    assert same_state(wrapper, other)
    other.load_state_dict(Normed().state_dict())
    assert not same_state(wrapper, other)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled, saved])
def test_a_copy_has_the_options_of_the_original(clone: Any) -> None:
    other = clone(checkpoint_wrapper(Mlp(), CheckpointImpl.REENTRANT, preserve_rng_state=False))
    assert other.checkpoint_impl is CheckpointImpl.REENTRANT
    assert other.checkpoint_fn.keywords == {"use_reentrant": True, "preserve_rng_state": False}
    assert clone(offload_wrapper(Mlp(), quota=0.5))._offload == rekindle.offload(quota=0.5)


@ours
def test_a_wrapper_does_not_outlive_its_last_name(wrap: Any) -> None:
    """Without the garbage collector: a wrapper is in no cycle."""
    died: list[bool] = []
    wrapper = wrap(nn.Linear(2, 2))
    weakref.finalize(wrapper, died.append, True)
    del wrapper
    assert died == [True]
