"""Why a tensor travels inside its message."""

from __future__ import annotations

import enum

__all__ = ["Reason"]


class Reason(enum.StrEnum):
    """One word for metrics; what comes with it in words says the rest. All but the first three are fallbacks."""

    EMPTY = "empty"
    """It has no bytes."""
    MODE = "mode"
    """The settings say inline."""
    SMALL = "small"
    """It is below the threshold."""
    RECEIVERS_DISAGREE = "receivers_disagree"
    """Mode or threshold are not the same for all who get this kind of tensor."""
    SEVERAL_READERS = "several_readers"
    """Several workers read it, and a segment has one reader, who removes it."""
    NO_WORKER = "no_worker"
    """auto, and it was not said who the receiver is."""
    NAMESPACE_UNKNOWN = "namespace_unknown"
    """auto, and we or the worker do not know the shared memory's id."""
    NAMESPACE_DIFFERS = "namespace_differs"
    """auto, and the worker's shared memory is another."""
    UID_DIFFERS = "uid_differs"
    """auto, and the worker runs as a user who may not read our files."""
    NOT_PROVED = "not_proved"
    """auto, and the worker has not been asked yet, or not answered yet."""
    PROOF_FAILED = "proof_failed"
    """auto, and the worker could not read what we wrote."""
    WORKER_GONE = "worker_gone"
    """The worker has ended, or was reported to."""
    NO_SPACE = "no_space"
    """The segment could not be written: no room. The ones below are failed writes, too."""
    PERMISSION = "permission"
    NOT_FOUND = "not_found"
    EXISTS = "exists"
    OS_ERROR = "os_error"

    @property
    def is_fallback(self) -> bool:
        """Whether shared memory was wanted."""
        return self not in (Reason.EMPTY, Reason.MODE, Reason.SMALL)
