"""Training steps to interrupt, one for each way of running them, and what must hold after it."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle import observation, policies
from rekindle.modules.forward import install_forward
from rekindle.offload.offloader import living_offloaders
from rekindle.offload.owners import owner_of
from rekindle.offload.tiers.workers import workers
from rekindle.regions.recompute import ambient
from rekindle.regions.selective import recorder as recording
from rekindle.strategy import SavedIndices
from rekindle.torch_private.autocast import autocast_level
from rekindle.torch_private.autograd_graph import exec_group
from rekindle.torch_private.func_transforms import old_vmap_level
from rekindle.torch_private.version_counters import versions_excluded
from tests.toys import Block, same_bits

_ROWS, _DIM = 4, 8
_SEED = 7


class Net(nn.Module):
    """Two blocks with dropout and a buffer that changes in forward."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Block(_DIM, drop=0.5), nn.BatchNorm1d(_DIM)) for _ in range(2)
        )
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return x


class Small(Net):
    """The same without buffers: a replay of it has nothing to put in place."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__(run)
        for block in self.blocks:
            del block[1]


def _checkpoint(block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, **options)
    return out


def _nested(block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return _checkpoint(block, x, **options)

    return _checkpoint(region, x)


_spill: dict[str, Any] = {"tier": "disk", "quota": 1.0, "min_bytes": 1}


def _saves(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        install_forward(block, SavedIndices((0, 2, 4, 6), (1, 3, 5, 7), "disk"), owner_of(model))


def _offloaded_blocks(model: nn.Module) -> None:
    for block, strategy in zip(model.blocks, ("recompute", "spill"), strict=True):  # type: ignore[arg-type]
        rekindle.apply(block, strategy)


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextmanager
def _other_surroundings() -> Iterator[None]:
    """A default device and attention kernels that the backward runs without."""
    kernels = torch.nn.attention.SDPBackend.MATH
    with torch.device("cpu"), torch.nn.attention.sdpa_kernel(kernels):
        yield


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    net: type[Net] = Net
    run: Callable[[nn.Module, Tensor], Tensor] | None = None
    prepare: Callable[[nn.Module], None] = lambda _: None
    forward_in: Callable[[], AbstractContextManager[Any]] = nullcontext
    plain_in: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Where the forward of the plain run it is compared with runs."""
    step_in: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_batched: bool = False
    """Whether gradients are asked for in a batch, as `is_grads_batched=True` does."""


WAYS: dict[str, Way] = {
    "recompute": Way(Small, _checkpoint),
    "recompute with buffers": Way(Net, _checkpoint),
    "nested": Way(Net, _nested),
    "values checked": Way(Small, partial(_checkpoint, determinism_check="values", debug=True)),
    "reentrant": Way(Net, partial(_checkpoint, use_reentrant=True)),
    "autocast": Way(Net, _checkpoint, forward_in=_autocast, plain_in=_autocast),
    "surroundings": Way(
        Net, _checkpoint, forward_in=_other_surroundings, plain_in=_other_surroundings
    ),
    "observed": Way(Small, _checkpoint, step_in=rekindle.observe),
    "batched": Way(Small, _checkpoint, is_batched=True),
    "policy": Way(Small, partial(_checkpoint, context_fn=policies.keep_matmuls)),
    "policy, nested": Way(Net, partial(_nested, context_fn=policies.keep_matmuls)),
    "policy, batched": Way(
        Small, partial(_checkpoint, context_fn=policies.keep_matmuls), is_batched=True
    ),
    "policy that spills": Way(
        Small, partial(_checkpoint, context_fn=policies.spill(policies.MATMULS))
    ),
    "saves": Way(Small, prepare=_saves),
    "disk": Way(Small, forward_in=partial(rekindle.offload, **_spill)),
    "disk, observed": Way(
        Small, forward_in=partial(rekindle.offload, **_spill), step_in=rekindle.observe
    ),
    "disk, recompute": Way(Net, _checkpoint, forward_in=partial(rekindle.offload, **_spill)),
    "disk by apply": Way(Small, prepare=_offloaded_blocks),
}


def settings() -> dict[str, Any]:
    """What a step may change and must leave as it was, random numbers aside."""
    return {
        "is_recomputing": rekindle.is_recomputing(),
        "names": ambient.names.get(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "gradients on": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "attention kernels": ambient.snapshot()[1:5],
        "__torch_function__": torch._C._is_torch_function_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "any dispatch mode": torch.utils._python_dispatch._is_in_torch_dispatch_mode,
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            autocast_level(),
        ),
        "transforms": torch._C._functorch.peek_interpreter_stack(),
        "vmap level": old_vmap_level(),
        "excluded keys": versions_excluded(),
        "recorded regions": len(recording._thread.recorders),
        "records nothing": recording._thread.is_paused,
        "exec group": exec_group(),
        "observations": len(observation.active),
    }


class _RandomStates(TorchDispatchMode):
    """The states that the generator passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {_random_state()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found.add(_random_state())
        return out


def _random_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


class Trainer:
    """Trains one model in one way; tells what is wrong after a step was interrupted."""

    def __init__(self, way: Way) -> None:
        self._way = way
        torch.manual_seed(_SEED)
        self._plain, self.model = way.net(), way.net(way.run)
        way.prepare(self.model)
        self._start = {k: v.clone() for k, v in self._plain.state_dict().items()}
        self._x = torch.randn(_ROWS, _DIM)
        self._expected = self._gradients_of(self._plain, way.plain_in)
        self._random_end = _random_state()
        self._random_states = self._states()
        self._buffers = [(m, dict(m._buffers), m.training) for m in self.model.modules()]
        self._settings = settings()
        self.phase = ""
        self._loss: Tensor | None = None

    def _states(self) -> set[bytes]:
        self._reset(self._plain)
        with _RandomStates() as states, self._way.plain_in():
            self._plain(self._x)
        return states.found

    def _reset(self, model: nn.Module) -> None:
        torch.manual_seed(_SEED)
        model.load_state_dict(self._start)
        model.zero_grad(set_to_none=True)

    def _forward(self, model: nn.Module, around: Callable[[], Any]) -> Tensor:
        x = self._x.clone().requires_grad_()
        with around():
            out: Tensor = model(x)
        return out if self._way.is_batched else out.square().sum()

    def _backward(self, model: nn.Module, loss: Tensor, retain: bool) -> list[Tensor | None]:
        parameters = list(model.parameters())
        if not self._way.is_batched:
            loss.backward(retain_graph=retain)
            return [parameter.grad for parameter in parameters]
        rows = torch.eye(2)[:, :, None, None].expand(2, 2, _ROWS // 2, _DIM).reshape(2, _ROWS, _DIM)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(
                torch.autograd.grad(
                    loss, parameters, rows, is_grads_batched=True, retain_graph=retain
                )
            )

    def _gradients_of(self, model: nn.Module, around: Callable[[], Any]) -> list[Tensor | None]:
        self._reset(model)
        return self._backward(model, self._forward(model, around), retain=False)

    def step(self, retain: bool = False) -> list[Tensor | None]:
        """One training step; with `retain`, its graph can be used once more."""
        self.prepare()
        return self.run(retain)

    def prepare(self) -> None:
        """Have everything as before a step."""
        self._loss = None
        self._reset(self.model)
        self.phase = "forward"

    def run(self, retain: bool) -> list[Tensor | None]:
        """The step itself."""
        with self._way.step_in():
            self._loss = self._forward(self.model, self._way.forward_in)
            self.phase = "backward"
            found = self._backward(self.model, self._loss, retain)
        self.phase = "done"
        return found

    def wrong_settings(self) -> list[str]:
        """What is not as it was before; asked while the interrupt's traceback lives."""
        now = settings()
        wrong = [
            f"{name} is {now[name]!r}, was {value!r}"
            for name, value in self._settings.items()
            if now[name] != value
        ]
        for module, buffers, training in self._buffers:
            found = module._buffers
            if found.keys() != buffers.keys() or any(found[k] is not buffers[k] for k in found):
                wrong.append(f"buffers of {type(module).__name__} are others")
            if module.training is not training:
                wrong.append(f"{type(module).__name__} is in another mode")
        expected = self._random_states if self.phase == "forward" else {self._random_end}
        if _random_state() not in expected:
            wrong.append("random numbers were rewound")
        return wrong

    def wrong_gradients(self) -> list[str]:
        """Whether the interrupted backward, and then a whole step, give other gradients."""
        wrong = []
        torch.set_grad_enabled(True)  # else one fault would be told of as many
        if self.phase in ("backward", "done") and self._loss is not None:
            self.model.zero_grad(set_to_none=True)
            wrong += self._compare("the same backward again", self._backward_again)
        self._loss = None
        wrong += self._compare("the next step", self.step)
        if _random_state() != self._random_end:
            wrong.append("random numbers are others after the next step")
        return wrong

    def _backward_again(self) -> list[Tensor | None]:
        assert self._loss is not None
        return self._backward(self.model, self._loss, retain=False)

    def _compare(self, what: str, gradients: Callable[[], list[Tensor | None]]) -> list[str]:
        try:
            found = gradients()
        except Exception as error:  # noqa: BLE001  (any is wrong)
            return [f"{what} fails: {type(error).__name__}: {error}"]
        same = map(same_bits, found, self._expected)
        return [] if all(same) else [f"{what} has other gradients"]

    def left_behind(self) -> list[str]:
        """Room on disk that is still taken when nothing is saved any more."""
        self._loss = None
        self.model.zero_grad(set_to_none=True)
        if not any(True for _ in living_offloaders()):
            return []
        gc.collect()
        workers.wait_until_idle()
        for engine in living_offloaders():
            engine.trim()
        devices = [each for one in living_offloaders() for each in one.by_device.values() if each]
        sizes = [each.tier.pool_bytes for each in devices]
        return [f"{size} bytes of disk stay taken" for size in sizes if size]
