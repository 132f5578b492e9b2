"""Lifetimes of native objects: one end, children first, and no use of freed memory.

Two events are kept apart. *Ending* (`close`, or a parent's, or being collected) stops everything
the object does and wakes whoever waits in it; calls that come later fail with an error. *Freeing*
happens when nobody holds the native pointer any more (`ffi.gc`), so that neither a thread that is
just entering a call nor a finalizer that runs late can meet freed memory: everything that may
still use a pointer holds it. Finalizers that have not run by then run at interpreter exit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Self


class Handle:
    """Base of what has a native life. `close` is idempotent and thread-safe."""

    def __init__(self, parent: Handle | None) -> None:
        self._parent = parent
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._closed = False
        self._closing = threading.Lock()
        if parent is not None:
            parent._children.add(self)

    def _end_with(self, end: Callable[..., object], *args: object) -> None:
        """Call `end(*args)` once: by `_finalizer()`, when collected, at the latest at exit."""
        self._finalizer = weakref.finalize(self, end, *args)

    def _end(self) -> None:
        """Stop what the object does. Called once."""

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End it, after everything that was made from it."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        failure: Exception | None = None
        for child in list(self._children):
            try:
                child.close()
            except Exception as error:  # the others, and this one, end all the same
                failure = failure or error
        self._end()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
