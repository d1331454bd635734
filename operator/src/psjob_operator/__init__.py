"""The operator and the command line of psjob."""
