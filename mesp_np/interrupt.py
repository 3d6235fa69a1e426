"""Ctrl-C that ends work at a good place: the first asks, the second insists."""

import signal
import threading
from contextlib import contextmanager


@contextmanager
def gently(told=lambda: None):
    """Within the `with` block the first Ctrl-C sets the yielded threading.Event, and `told` is called.

    The second interrupts as usual.  Only the main thread may handle signals; in others the event stays unset.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(*_):
        asked.set()
        signal.signal(signal.SIGINT, before)
        told()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
