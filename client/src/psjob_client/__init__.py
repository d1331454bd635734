"""What a person uses of psjob: the command line, local runs, comparisons and planners."""
