"""What does here what a function of cuDNN does: a table, and the page made from it."""
