"""How many streams one router holds open, and what it adds to each of their items."""
