"""One machine below the same plan: processes in place of pods."""
