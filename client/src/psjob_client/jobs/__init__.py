"""A job as people see it, the same for a run of this machine and for a job on a cluster: what every verb and page shows."""
