"""A real Kubernetes on one machine, without a registry: control plane, kwok nodes, real nodes. See README.md beside this file."""
