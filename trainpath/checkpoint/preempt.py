"""Preemption: SIGTERM becomes one last checkpoint at a step that all ranks agree on."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainpath.errors import PeerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PreemptionGuard"]

# How often the ranks exchange their flags: often enough to leave the deadline to the
# checkpoint, seldom enough to cost nothing on steps of a few milliseconds.
_EXCHANGE_S = 0.2

# How long another rank may be behind, evaluating for instance, before it counts as gone.
_PEER_S = 600.0


class PreemptionGuard:
    """Catches a signal and tells, at a step boundary, that every rank must stop there.

    The handler only sets a flag. At every `k`-th step boundary the ranks start an
    asynchronous all-reduce of (flag, k) and read its result at the next boundary, so all of
    them learn of the signal at the same step and nobody waits for it. `k` follows the
    measured step time and is part of the exchange, hence equal everywhere.

    Args:
        process_group: Group to agree over, of its own and with a CPU backend; None for one
            process.
        deadline_s: From the signal, after which `on_deadline` runs and the process ends by
            the signal, whatever the step thread is doing.
        on_deadline: Called once on a timer thread, to save what can be saved.
        signum: The signal.

    Guarantee:
        A handler that the script had installed before is still called. Where the script
        had none, the process ends by `SystemExit(128 + signum)` after the caller has saved,
        or by the signal itself at the deadline.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        deadline_s: float = 25.0,
        on_deadline: Callable[[], None] | None = None,
        signum: signal.Signals = signal.SIGTERM,
    ) -> None:
        self._group = process_group
        self._deadline_s = deadline_s
        self._on_deadline = on_deadline
        self.signum = signum
        self._pid = os.getpid()
        self._signalled = False
        self._timer: threading.Timer | None = None
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._every = 1
        self._boundaries = 0
        self._last_boundary = time.monotonic()
        self.requested = False
        self._installed = threading.current_thread() is threading.main_thread()
        self._previous: Any = None
        if self._installed:
            self._previous = signal.signal(signum, self._handle)

    @property
    def owns_exit(self) -> bool:
        """Whether ending the process is ours (the script had no handler of its own)."""
        return self._previous in (None, signal.SIG_DFL)

    def _handle(self, signum: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a forked child inherits handlers, not duties
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if not self._signalled:
            self._signalled = True
            self._timer = threading.Timer(self._deadline_s, self._expire)
            self._timer.name = "trainpath-preempt-deadline"
            self._timer.daemon = True
            self._timer.start()
        if callable(self._previous):
            self._previous(signum, frame)

    def _expire(self) -> None:
        try:
            if self._on_deadline is not None:
                self._on_deadline()
        finally:
            if self.owns_exit:
                self._die()

    def _die(self) -> None:
        # signal.signal() is for the main thread only; the default action of the signal is
        # what ends a process that is stuck in native code, so reset it at the C level.
        import ctypes  # noqa: PLC0415 - only on this path

        ctypes.CDLL(None).signal(int(self.signum), 0)
        os.kill(self._pid, self.signum)

    def at_boundary(self) -> bool:
        """Exchange flags at a step boundary; return whether to save and stop now.

        Collectives: one asynchronous all-reduce of two integers every few steps, on the
        guard's own process group.

        Raises:
            PeerTimeoutError: Another rank did not take part in the last exchange.
        """
        if self._group is None:
            self.requested = self.requested or self._signalled
            return self.requested
        now = time.monotonic()
        step_s, self._last_boundary = now - self._last_boundary, now
        self._boundaries += 1
        if self._exchange is not None:
            tensor, work = self._exchange
            self._exchange = None
            self._wait(work)
            self.requested = self.requested or bool(tensor[0].item())
            self._every = int(tensor[1].item())
        elif self._boundaries % self._every == 0:
            wanted = min(1000, max(1, math.floor(_EXCHANGE_S / max(step_s, 1e-6))))
            tensor = torch.tensor([int(self._signalled), wanted], dtype=torch.int64)
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True)
            self._exchange = (tensor, work)
        return self.requested

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait(timedelta(seconds=_PEER_S))
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"rank {dist.get_rank(self._group)} waited {_PEER_S:.0f} s for the other "
                f"ranks at step boundary {self._boundaries}; one of them left the training loop "
                "earlier or failed (see its output)"
            ) from error

    def close(self) -> None:
        """Give the signal back to its former handler; safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self._exchange is not None:
            # Every rank that is alive has started it too; a dead one must not hold us up.
            with contextlib.suppress(RuntimeError):
                self._exchange[1].wait(timedelta(seconds=2))
            self._exchange = None
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(self.signum) == self._handle:
                signal.signal(self.signum, self._previous or signal.SIG_DFL)
