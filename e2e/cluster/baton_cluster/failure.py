"""Errors that a user is meant to read: what failed, and what to do next."""


class ClusterError(Exception):
    """Its text is printed as it is, without a traceback."""


class NotFetched(ClusterError):
    """What is not on this machine could not be had from the network, and why, in one line: no failure of what is built or tested."""
