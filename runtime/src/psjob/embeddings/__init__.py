"""Modules and tables whose rows lie on the shards."""
