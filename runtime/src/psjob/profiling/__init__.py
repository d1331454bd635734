"""What each part of a model takes: seconds and bytes of a forward and a backward pass, for planners of pipeline stages.

`find` gets a model and its inputs out of a script and chooses the parts, and `profile` times them.
"""
