"""The commands psjob, kubectl-psjob and psjob-operator."""
