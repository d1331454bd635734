"""What a push does to the parameters."""
