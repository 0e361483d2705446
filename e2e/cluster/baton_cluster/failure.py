"""The one error that a user is meant to read: what failed, and what to do next."""


class ClusterError(Exception):
    """Its text is printed as it is, without a traceback."""
