"""The manifest: models of spec and status, validation and the CRD."""
