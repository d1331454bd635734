"""How far it is from every node of a road map to every other, by (min, +) pushes: one table on the shards, no gradient, no model."""

import random

import torch

import psjob as ps

NODES, ROADS = 50, 150


class Map(torch.nn.Module):
    """Row v says how far it is from each node to v, as far as anybody has found."""

    def __init__(self) -> None:
        super().__init__()
        self.far = ps.Table(NODES, NODES, combine="min")


def main() -> None:
    mine = road_map()[ps.rank() :: ps.world()]
    begins, ends, lengths = (torch.tensor(column) for column in zip(*mine, strict=True))
    model, loop = ps.attach(Map())

    everywhere = torch.arange(NODES)
    if ps.is_first():
        model.far.push(everywhere, torch.full((NODES, NODES), torch.inf).fill_diagonal_(0))
    loop.step()
    steps, known, far = 1, None, model.far.pull(everywhere)
    while known is None or not torch.equal(known, far):  # in sync all see the same, so all stop at the same step
        model.far.push(ends, far[begins] + lengths[:, None])
        loop.step()
        steps += 1
        known, far = far, model.far.pull(everywhere)

    if ps.is_first():
        print(f"found after {steps} steps; the two nodes farthest apart are {far.max():.0f} apart", flush=True)


def road_map() -> list[tuple[int, int, float]]:
    """Roads (from, to, length), one way; a ring among them, so that every node is reached."""
    chance = random.Random(7)
    ring = [(node, (node + 1) % NODES) for node in range(NODES)]
    others = [(chance.randrange(NODES), chance.randrange(NODES)) for _ in range(ROADS)]
    return [(begin, end, float(chance.randint(1, 100))) for begin, end in ring + others]


if __name__ == "__main__":
    main()
