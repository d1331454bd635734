"""Collectives: schedules that say who sends what to whom in which step, and a runner that carries them out point to point."""
