"""How recipes and other files of settings are read, checked and written, whatever they set."""
