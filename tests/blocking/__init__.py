"""Tests of the client without asyncio."""
