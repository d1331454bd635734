"""Which way of summing gradients is quickest on a machine: figures, cost models, and the choice. Pure: no I/O, clock or chance.

`machine` describes a machine and says what it carries at once, `costs` has the formulas, `choose` puts a machine's numbers into them and
picks.
"""
