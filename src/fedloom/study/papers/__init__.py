"""The papers' own figures: numbers that single methods record in a run, as tables and pictures."""
