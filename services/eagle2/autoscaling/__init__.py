"""How many pairs are wanted. Pure and torch-free."""
