"""Pure decisions: a job, what exists and the time go in; actions and a status come out."""
