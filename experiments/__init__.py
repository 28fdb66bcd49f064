"""Binaries: flags, one call, a result file."""
