"""A seeded simulator of the protocol: the shipped machines on a virtual clock, network and disk, with faults and promises.

`kernel` is time, chance and processes; `network` and `volume` fail by a seed; `shard` and `worker` carry the machines' actions out;
`planner` stands for the operator; `promises` looks after every step; `plan` draws a run from a seed; `shrink` makes a failing one short.
"""
