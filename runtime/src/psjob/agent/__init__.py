"""The agent of a worker of several processes: it starts the script once for each of them, and again in place where one dies."""
