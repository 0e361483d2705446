"""Errors that a user is meant to read."""


class EngineError(Exception):
    """Its text is printed as it is, without a traceback."""


class NotHere(EngineError):
    """This machine cannot have the engine, and why: not a failure of what is tested."""
