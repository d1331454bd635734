"""Tests of the documentation: links, the site, its search, its blocks of code, its prose."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
