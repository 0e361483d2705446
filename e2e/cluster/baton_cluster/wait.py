"""Waiting for what can be seen, with a deadline; what was seen last is in the error."""

import time
from collections.abc import Callable

from .failure import ClusterError


def until(what: str, seconds: float, in_the_way: Callable[[], str | None], between: Callable[[], None] = lambda: None) -> None:
    """Asks what is still in the way until that is nothing. `between` may raise where waiting has become pointless."""
    deadline = time.monotonic() + seconds
    while (seen := in_the_way()) is not None:
        between()
        if time.monotonic() > deadline:
            raise ClusterError(f"not within {seconds:.0f} s: {what}; last seen: {seen}")
        time.sleep(0.1)
