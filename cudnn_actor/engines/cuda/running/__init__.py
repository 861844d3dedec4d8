"""Plans: as data, explained, loaded from bytes, and launched."""
