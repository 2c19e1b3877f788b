"""Errors that a person can act on."""


class ReportedError(Exception):
    """Its text is all a person needs (what, where, what would work): programs print it without a traceback and exit 1."""


class DataError(ReportedError, ValueError):
    """The data cannot be used as asked; the message is one line that names the file or sample and what was expected."""


# What the transports say when the process at the other end has ended (shared memory, gloo, NCCL).
PEER_GONE = ("processes have ended", "closed by peer", "reset by peer", "Broken pipe", "remote process exited")


def peer_gone(error: BaseException) -> bool:
    """Whether a communication error only says that another rank is gone; that rank has said why, unless it was killed."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in PEER_GONE)
