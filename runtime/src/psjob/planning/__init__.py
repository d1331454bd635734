"""Where to cut a model into pipeline stages, and what that takes: plans, solvers and predictions. Pure: no I/O, clock or chance.

`profile` is what was measured of a model, `plan` has the machine, the way to train and a plan, `predict` judges one plan, and `solve`
looks for the best one.
"""
