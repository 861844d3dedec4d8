"""The tables of docs/semantics.md, brought about."""
