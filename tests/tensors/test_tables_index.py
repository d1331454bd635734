"""id → slot, against a dict."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.tables.slab import Index

torch.set_num_threads(1)

EDGES = [0, -1, -2, 1, (1 << 63) - 1, -(1 << 63), 1 << 32, -(1 << 32)]
ID = st.one_of(st.sampled_from(EDGES), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-40, 40))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.booleans(), st.lists(ID, max_size=60)), max_size=8))
def test_it_holds_what_a_dict_holds(turns: list[tuple[bool, list[int]]]) -> None:
    index, truth, slot = Index(), dict[int, int](), 0
    for add, ids in turns:
        if add:
            new = [i for i in dict.fromkeys(ids) if i not in truth]
            index.insert(torch.tensor(new, dtype=torch.int64), torch.arange(slot, slot + len(new)))
            truth |= {i: slot + at for at, i in enumerate(new)}
            slot += len(new)
        else:
            index.delete(torch.tensor(ids, dtype=torch.int64))
            for i in ids:
                truth.pop(i, None)
        asked = [*EDGES, *ids, *ids, *truth]
        found = index.lookup(torch.tensor(asked, dtype=torch.int64)).tolist()
        assert [max(-1, s) for s in found] == [truth.get(i, -1) for i in asked]
        assert len(index) == len(truth)


def test_it_grows_and_forgets_the_dead() -> None:
    index = Index()
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (40_000,), generator=torch.Generator().manual_seed(1))
    ids = torch.unique(ids)
    index.insert(ids, torch.arange(len(ids)))
    assert torch.equal(index.lookup(ids), torch.arange(len(ids)))
    size = index.nbytes
    for turn in range(20):  # the dead make room for the next without end
        index.delete(ids)
        assert len(index) == 0 and bool((index.lookup(ids) < 0).all())
        ids = ids + (turn + 1)
        index.insert(ids, torch.arange(len(ids)))
    assert index.nbytes <= 2 * size
    assert torch.equal(index.lookup(ids), torch.arange(len(ids)))


def test_ids_in_steps_do_not_pile_up() -> None:
    """Ids of one pattern (multiples of a power of two, a high half that counts) are found in few rounds, not one after another."""
    for shift in (0, 8, 20, 32, 44):
        index = Index()
        ids = torch.arange(1 << 15) << shift
        index.insert(ids, torch.arange(len(ids)))
        distance = (index._find(ids) - index._start(ids)) & index._mask
        assert float(distance.double().mean()) < 8, shift
        assert torch.equal(index.lookup(ids), torch.arange(len(ids)))
