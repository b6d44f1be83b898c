"""Programs that measure: each prints its numbers and the machine they belong to."""
