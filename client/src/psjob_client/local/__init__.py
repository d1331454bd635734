"""One machine below the same plan: processes in place of pods. This is `psjob run`."""
