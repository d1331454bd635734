"""Pure rules of when a push counts and when a worker may go on."""
