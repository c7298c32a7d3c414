"""From a recipe to the rounds of a run: what is built, what is refused, what a round does, what is written."""
