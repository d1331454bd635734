"""The watched namespaces, each by itself: what of them was listed, and what may not be read. One that is refused keeps no other waiting."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from psjob_operator.cluster.kinds import OPTIONAL, WATCHED, ResourceKind


class Places:
    """What is known of each namespace; the empty one stands for all of them."""

    def __init__(self, namespaces: Sequence[str] = (), kinds: Collection[ResourceKind] = WATCHED) -> None:
        self.all = tuple(namespaces) or ("",)
        self._missing = {(kind, place) for kind in kinds for place in self.all}
        self._refused: dict[tuple[str, ResourceKind, str], str] = {}
        """By place, kind and verb."""

    def listed(self, kind: ResourceKind, place: str) -> None:
        """A list of this kind was taken in."""
        self._missing.discard((kind, place))
        self.may(kind, place, "list")

    def may(self, kind: ResourceKind, place: str, verb: str) -> None:
        """The API server has granted this now."""
        self._refused.pop((place, kind, verb), None)

    def refused(self, kind: ResourceKind, place: str, verb: str, why: str) -> None:
        """It may not be listed or watched, `why` in the API server's words. What is optional is done without."""
        if kind in OPTIONAL:
            self._missing.discard((kind, place))
        else:
            self._refused[place, kind, verb] = why

    def shut(self, namespace: str) -> str:
        """Why nothing is done in this namespace; empty where all of it can be read."""
        places = ("", namespace) if "" in self.all else (namespace,)
        return next((self._words(place) for place in places if self._words(place)), "")

    def _words(self, place: str) -> str:
        found = sorted((kind.plural, verb, why) for (at, kind, verb), why in self._refused.items() if at == place)
        if not found:
            return ""
        plural, verb, why = found[0]
        where = f" in namespace {place}" if place else ""
        return f"the right to {verb} {plural}{where}: {why}"

    def shut_places(self) -> Mapping[str, str]:
        """Why, by place, of all that are refused."""
        return {place: words for place in self.all if (words := self._words(place))}

    @property
    def whole(self) -> bool:
        """Each place was listed whole or is refused, and one at least was listed."""
        shut = self.shut_places()
        return len(shut) < len(self.all) and all(place in shut for _, place in self._missing)

    @property
    def blind(self) -> str:
        """What is waited for where no place can be read; empty while one can."""
        shut = self.shut_places()
        return next(iter(shut.values())) if len(shut) == len(self.all) else ""
