"""The one base class of errors that a person can act on."""


class ReportedError(Exception):
    """Its text is all a person needs (what, where, what would work): programs print it without a traceback and exit 1."""
