"""How settings are read: strict sections, named functions with parameters, YAML, and messages about mistakes."""
