"""When a keeper judges that its server hangs."""

from __future__ import annotations

import pytest

from psjob.shard.keeper import LOOKS, Watch

SECONDS = 4.0
STEP = SECONDS / LOOKS


def hangs(*beats: int, pauses: dict[int, float] | None = None) -> int | None:
    """The look at which it hangs first, with these beats at one look after the other; a look of `pauses` comes so much later."""
    watch, now = Watch(), 0.0
    for number, seen in enumerate(beats):
        now += STEP + (pauses or {}).get(number, 0.0)
        if watch.hangs(seen, SECONDS, now):
            return number
    return None


@pytest.mark.parametrize(
    ("beats", "pauses", "at"),
    [
        pytest.param((0, 1, 2, 3, 4, 5, 6, 7, 8), {}, None, id="alive"),
        pytest.param((0, 1, 2, 2, 2, 2, 2, 2), {}, 2 + LOOKS, id="silent after a sign"),
        pytest.param((0, 1, 2, 2, 2, 2, 3, 3, 3), {}, None, id="a sign in time"),
        pytest.param((5,) * 20, {}, LOOKS, id="silent from the first one on"),
        pytest.param((0, 1, 2, 2, 2, 2, 2, 2, 2, 2), {5: 60.0}, 5 + LOOKS, id="the keeper stood still too"),
    ],
)
def test_a_server_hangs_after_a_silence(beats: tuple[int, ...], pauses: dict[int, float], at: int | None) -> None:
    assert hangs(*beats, pauses=pauses) == at
