"""Installations, and what a GPU says."""
