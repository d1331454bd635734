"""How many members stand at each number: lowest at hand at once, however many members there are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Tally:
    """Members have no names here: one that moves says from which number to which."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._count = Counter(numbers)
        self._lowest = min(self._count, default=0)

    def copy(self) -> Tally:
        made = Tally()
        made._count, made._lowest = self._count.copy(), self._lowest
        return made

    def __bool__(self) -> bool:
        return bool(self._count)

    @property
    def lowest(self) -> int:
        """0 without members."""
        return self._lowest

    @property
    def highest(self) -> int:
        """0 without members. It takes a look at each number where somebody stands."""
        return max(self._count, default=0)

    def all_at(self, number: int) -> bool:
        """Does nobody stand at another number?"""
        return not self._count or (len(self._count) == 1 and number in self._count)

    def add(self, number: int) -> None:
        """A member more."""
        if not self._count or number < self._lowest:
            self._lowest = number
        self._count[number] += 1

    def remove(self, number: int) -> None:
        """A member less. Raises KeyError where none stands at `number`."""
        left = self._count.pop(number) - 1
        if left:
            self._count[number] = left
        elif number == self._lowest:
            self._lowest = number + 1 if number + 1 in self._count else min(self._count, default=0)

    def move(self, old: int, new: int) -> None:
        """A member goes from `old` to `new`. A step of 1 looks at no other number."""
        self.add(new)
        self.remove(old)
