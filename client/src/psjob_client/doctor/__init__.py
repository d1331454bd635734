"""What stands between a job and its training: facts of this machine or a cluster are gathered thinly, and judged by pure functions."""
