"""Where to cut a model into pipeline stages, and what that takes: plans, solvers and predictions. Pure: no I/O, clock or chance.

`profile` is what was measured of a model, `grid` the machine, `ways` how stages train. `bounds` has the formulas, `timeline` plays a
schedule, `predict` judges one plan; `partition` and `mixed` look for the best one. The client has copies of these files, by
`make generate`.
"""
