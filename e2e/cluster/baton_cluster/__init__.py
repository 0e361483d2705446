"""A real Kubernetes for tests on one machine: its programs, its control plane, its nodes.

`command.py` is the table of contents: one function for each thing that can be asked for.
"""
