"""Every exception trainpath raises on purpose.

Each error is a `TrainpathError` and also the nearest builtin, so that existing
`except OSError` code keeps working::

    TrainpathError
      ConfigError (ValueError)              bad argument, setting or combination of them
      MissingDependencyError (ImportError)  an optional package is not installed
      ClosedError (RuntimeError)            the component was closed before this call
      DeadlineError (TimeoutError)          a wait ran past its deadline
      data
        ShardNotFoundError (FileNotFoundError)  a shard URL or path does not exist
        ShardCorruptError (ValueError)          not a tar, cut short, or odd members
        DecodeError (ValueError)                a sample could not be decoded
        WorkerDiedError (RuntimeError)          a loader worker died for good
      storage
        FetchError (OSError)                    an origin answered with an error after all retries
        CacheWriteError (OSError)               the cache directory cannot be written
      communication
        PeerError (RuntimeError)                another rank failed or left
        PeerTimeoutError (TimeoutError)         another rank did not answer in time
        ReplicaMismatchError (ValueError)       the ranks hold different models or settings
        UnreducedGradientError (RuntimeError)   step() on gradients that were never reduced
      checkpoint
        CheckpointNotFoundError (FileNotFoundError)  no such step, or no valid step at all
        CheckpointCorruptError (ValueError)          a checkpoint fails its own proof
        CheckpointWriteError (OSError)               a checkpoint could not be written
        StateMismatchError (ValueError)              checkpoint and live objects do not fit together
"""

from __future__ import annotations

__all__ = [
    "CacheWriteError",
    "CheckpointCorruptError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "DecodeError",
    "FetchError",
    "MissingDependencyError",
    "PeerError",
    "PeerTimeoutError",
    "ReplicaMismatchError",
    "ShardCorruptError",
    "ShardNotFoundError",
    "StateMismatchError",
    "TrainpathError",
    "UnreducedGradientError",
    "WorkerDiedError",
]


class TrainpathError(Exception):
    """Root of every exception that trainpath raises on purpose."""


class ConfigError(TrainpathError, ValueError):
    """An argument, a setting or a combination of them makes no sense."""


class MissingDependencyError(TrainpathError, ImportError):
    """An optional package is needed; the message names the extra to install."""


class ClosedError(TrainpathError, RuntimeError):
    """The component was closed before this call."""


class DeadlineError(TrainpathError, TimeoutError):
    """A wait ran past its deadline."""


class ShardNotFoundError(TrainpathError, FileNotFoundError):
    """A shard URL or path does not exist."""


class ShardCorruptError(TrainpathError, ValueError):
    """A shard is not a readable tar, is cut short, or has members that cannot be samples."""


class DecodeError(TrainpathError, ValueError):
    """A sample was read but could not be decoded."""


class WorkerDiedError(TrainpathError, RuntimeError):
    """A loader worker process died and could not be replaced."""


class FetchError(TrainpathError, OSError):
    """An origin answered with an error, or with wrong bytes, after all retries."""


class CacheWriteError(TrainpathError, OSError):
    """The cache directory cannot be created or written."""


class PeerError(TrainpathError, RuntimeError):
    """Another rank failed or left; the message names it."""


class PeerTimeoutError(TrainpathError, TimeoutError):
    """Another rank did not answer before the deadline; the message names it."""


class ReplicaMismatchError(TrainpathError, ValueError):
    """The ranks do not hold the same model, plan or settings."""


class UnreducedGradientError(TrainpathError, RuntimeError):
    """`optimizer.step()` was called on gradients that were never reduced across ranks."""


class CheckpointNotFoundError(TrainpathError, FileNotFoundError):
    """The step asked for is not in the directory, or no step in it is valid."""


class CheckpointCorruptError(TrainpathError, ValueError):
    """A checkpoint is incomplete or its bytes do not match its manifest."""


class CheckpointWriteError(TrainpathError, OSError):
    """A checkpoint could not be written; the previous valid one is untouched."""


class StateMismatchError(TrainpathError, ValueError):
    """The checkpoint and the live objects have different names, shapes or dtypes."""
