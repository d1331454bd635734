"""Kubernetes below the plan: wake, queue, observe and apply."""
