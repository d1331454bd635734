"""The commands psjob and kubectl-psjob."""
