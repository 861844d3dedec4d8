"""The libraries: which are there, how they are loaded, and what they raise."""
