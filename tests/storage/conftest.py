"""What the tests of stores share."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run: a failure is about the change that caused it.
settings.register_profile("storage", database=None, deadline=None, derandomize=True)
settings.load_profile("storage")
