"""A KV connector for vLLM that hands its KV blocks to the Baton daemon beside it."""

__version__ = "0.1.0"
