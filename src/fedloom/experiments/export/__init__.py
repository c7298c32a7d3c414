"""Finished runs, opened again: bundles to use elsewhere, and pictures of what models predict."""
