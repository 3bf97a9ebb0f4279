"""A real Ctrl-C: a signal that another thread sends to the main thread while it runs a call."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signal:
    """Interrupts a call by SIGINT, so many seconds after it has begun."""

    def __init__(self, after: float) -> None:
        self.where = ""
        """The place of the interrupt."""
        self._after = after
        self._is_armed = False

    def run(self, function: Callable[[], Any]) -> KeyboardInterrupt | None:
        """Call a function; the interrupt if it came out of it, with every frame it passed."""
        before = signal.signal(signal.SIGINT, self._strike)
        begun, main = threading.Event(), threading.get_ident()

        def send() -> None:
            begun.wait()
            time.sleep(self._after)
            signal.pthread_kill(main, signal.SIGINT)

        sender = threading.Thread(target=send)
        sender.start()
        error = None
        try:
            begun.set()
            self._is_armed = True
            function()
            self._is_armed = False
        except KeyboardInterrupt as struck:
            error = struck
        sender.join()  # a signal that comes late strikes nobody
        signal.signal(signal.SIGINT, before)
        return error

    def _strike(self, _: int, frame: FrameType | None) -> None:
        if not self._is_armed:
            return
        self._is_armed = False
        if frame is not None:
            code = frame.f_code
            self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        raise KeyboardInterrupt
