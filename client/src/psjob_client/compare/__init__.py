"""The same job in several modes, side by side: `psjob compare`."""
