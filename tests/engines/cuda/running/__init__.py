"""Plans, programs and what they prepare."""
