"""Errors that a user is meant to read: what failed, and what to do next."""


class ImageError(Exception):
    """Its text is printed as it is, without a traceback."""


class NotFetched(ImageError):
    """What is not on this machine could not be had from the network: no failure of what is put into images."""
