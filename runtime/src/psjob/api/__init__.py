"""What a script calls: attach, its slice of the data, reports."""
