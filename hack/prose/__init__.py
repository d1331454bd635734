"""The prose linter of the documentation: vale with the rules and word lists of this folder."""
