"""Tests here compute and do nothing else."""

from tests.pure import pure as pure
