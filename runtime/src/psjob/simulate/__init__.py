"""The same modes and rules on a virtual clock: `psjob simulate`."""
