"""Tests of plans kept on disk."""
