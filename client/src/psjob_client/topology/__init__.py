"""Which way of summing gradients is quickest on a machine: figures, cost models, and the choice. Pure: no I/O, clock or chance.

`links` describes a machine, `routes` says what it carries at once, `costs` has the formulas, `estimate` puts a machine's numbers into
them, and `choose` picks.
"""
