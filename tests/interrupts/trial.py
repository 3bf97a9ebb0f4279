"""One interrupt and all that is looked at after it."""

import gc
import sys
import time
from typing import Any

from tests.interrupts.moments import Moments
from tests.interrupts.signals import Signal
from tests.interrupts.steps import WAYS, Trainer


class Trial:
    """Steps of one way of training, interrupted one by one at chosen moments."""

    def __init__(self, way: str) -> None:
        self.trainer = Trainer(WAYS[way])
        gc.collect()
        gc.freeze()  # so that a collection takes no time
        for _ in range(3):  # so that nothing is done for the first time, and steps are known
            assert not self.trainer._compare("a step", self.trainer.step)

    def moments(self, retain: bool) -> int:
        """How many there are in a step."""
        counting = Moments()
        self.trainer.prepare()
        assert not counting.run(lambda: self.trainer.run(retain))
        return counting.count

    def seconds(self) -> float:
        """How long a step takes, about."""
        self.trainer.prepare()
        began = time.perf_counter()
        self.trainer.run(retain=False)
        return time.perf_counter() - began

    def interrupted(self, at: int, retain: bool) -> list[str]:
        """Interrupt a step at a moment; what is wrong afterwards."""
        return self._after(Moments(at), retain)

    def signalled(self, after: float, retain: bool) -> list[str]:
        """Interrupt a step by a signal, so many seconds after it has begun."""
        return self._after(Signal(after), retain)

    def _after(self, interrupt: Moments | Signal, retain: bool) -> list[str]:
        finalizers: list[str] = []
        hook, sys.unraisablehook = sys.unraisablehook, lambda args: finalizers.append(_told(args))
        try:
            wrong = self._look(interrupt, retain)
            if any(finalizers):
                wrong.append(f"finalizers failed: {', '.join(filter(None, finalizers))}")
        finally:
            sys.unraisablehook = hook
        return wrong

    def _look(self, interrupt: Moments | Signal, retain: bool) -> list[str]:
        wrong: list[str] = []
        trainer = self.trainer
        trainer.prepare()
        error: BaseException | None
        try:
            error = interrupt.run(lambda: trainer.run(retain))
        except Exception as other:  # noqa: BLE001  (any is wrong)
            error = other
            wrong.append(f"the interrupt came out as {other!r}")
        place = f"{trainer.phase}, {interrupt.where}"
        wrong += trainer.wrong_settings()  # `error` still holds every frame
        del error
        if not retain:
            trainer._loss = None
        wrong += trainer.wrong_gradients()
        wrong += trainer.left_behind()
        return [f"[{place}] {what}" for what in wrong]


def _told(args: Any) -> str:
    """An error that a finalizer could not raise; nothing for an interrupt, and for torch's own."""
    name = getattr(args.object, "__qualname__", repr(args.object))
    if args.exc_type is KeyboardInterrupt or name.startswith("StorageWeakRef."):
        return ""
    return f"{name}: {args.exc_value!r}"
