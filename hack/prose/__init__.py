"""The prose linter of documentation, docstrings and messages: vale with the rules and word lists of this folder."""
