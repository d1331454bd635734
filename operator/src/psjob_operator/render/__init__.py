"""Pure builders of the Kubernetes documents that a plan asks for."""
