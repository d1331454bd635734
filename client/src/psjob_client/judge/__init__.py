"""Manifests judged by the rules of the API server, with the line of each value; and what is legal and likely wrong."""
