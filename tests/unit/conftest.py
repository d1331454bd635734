"""Tests here compute and do nothing else."""

import urllib3  # noqa: F401  # as it is imported it binds a socket to learn of IPv6; it is here before the first test

from tests.support.pure import pure as pure
