"""Lines of a shard's log on streams that it has refused."""

from __future__ import annotations

from psjob.shard.acceptor import MOST_LINES, QUIET_SECONDS, LogRateLimiter


def test_a_host_has_one_line_a_minute() -> None:
    notices = LogRateLimiter()
    assert [notices.told("a", now) for now in (0.0, 1.0, QUIET_SECONDS - 0.1, QUIET_SECONDS)] == [0, None, None, 2]
    assert notices.told("b", QUIET_SECONDS) == 0


def test_all_hosts_together_have_a_bounded_number_of_lines() -> None:
    """Also where there are more of them than are remembered."""
    notices, lines = LogRateLimiter(), []
    for number in range(30_000):  # of 3,000 hosts, in three minutes
        now = number / 30_000 * 3 * QUIET_SECONDS
        if notices.told(f"host {number % 3000}", now) is not None:
            lines.append(now)
        assert len(notices._told) <= MOST_LINES
    for begin in lines:
        assert sum(begin <= line < begin + QUIET_SECONDS for line in lines) <= MOST_LINES
    assert len(lines) >= 2 * MOST_LINES


def test_what_had_no_line_is_told_by_its_number() -> None:
    notices = LogRateLimiter()
    said = [notices.told(f"host {number}", 0.0) for number in range(MOST_LINES + 7)]
    assert said == [0] * MOST_LINES + [None] * 7
    assert notices.told("another", QUIET_SECONDS) == 7
