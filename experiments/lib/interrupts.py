"""Interrupts that cannot be lost: Ctrl-C while a script works."""

import signal
import sys
import threading
from typing import NoReturn


class Interrupts:
    """Raises KeyboardInterrupt at SIGINT, and again where that was lost.

    jax and other libraries run Python functions in garbage collection, and an
    exception that is raised there ends in `sys.unraisablehook`: without this class
    the script goes on as if there had been no interrupt.

    Attributes:
      came: whether there was one.
    """

    _AGAIN_S = 0.02

    def __init__(self):
        self.came = False
        self._again = None

    def __enter__(self) -> "Interrupts":
        self._hook = sys.unraisablehook
        self._handler = None
        # Other threads have no signals, and who ignores them goes on doing so.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            sys.unraisablehook = self._raise_again
            self._handler = signal.signal(signal.SIGINT, self._raise)
        return self

    def __exit__(self, *exc_info) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            sys.unraisablehook = self._hook

    def ignore(self) -> None:
        """What comes now changes nothing."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _raise(self, *_) -> NoReturn:
        self.came = True
        raise KeyboardInterrupt

    def _raise_again(self, lost) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._hook(lost)
            return
        # Not from here, where it would be lost again.
        # And as a signal, which ends what the main thread may be waiting for.
        main = threading.main_thread().ident
        self._again = threading.Timer(
            self._AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)
        )
        self._again.daemon = True
        self._again.start()
