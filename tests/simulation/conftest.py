"""Tests here compute and do nothing else."""

from tests.support.pure import pure as pure
