"""Tests of the inference server."""
