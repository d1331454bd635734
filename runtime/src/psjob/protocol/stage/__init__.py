"""What workers of neighbouring stages of a model give each other."""
