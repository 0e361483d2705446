"""Container images without a container engine: a binary, what it is linked to, and the licences of both.

`recipes.py` says what is in each image; `command.py` is the program.
"""
