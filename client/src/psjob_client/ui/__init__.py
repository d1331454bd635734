"""A page in the browser for jobs of this machine and of a cluster, and for comparisons."""
