"""The operator beside a bare client that makes the same number of pods, on one control plane with nodes that pretend."""
