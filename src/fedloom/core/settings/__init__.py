"""Reading of settings: strict sections, named functions with parameters, YAML, and messages about mistakes."""
