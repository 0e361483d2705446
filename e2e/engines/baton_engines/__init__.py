"""Installs vLLM for tests and makes the model that they serve."""
