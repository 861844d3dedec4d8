"""Transfers, and ranges around launches."""
