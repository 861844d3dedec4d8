"""The tables of docs/semantics.md and docs/failures.md, brought about."""
