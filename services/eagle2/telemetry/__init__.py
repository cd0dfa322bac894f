"""Names and rendering of everything that is measured."""
