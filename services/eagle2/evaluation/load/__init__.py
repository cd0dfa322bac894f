"""An engine under load: many requests at once, with speculation off, fixed and adaptive."""
