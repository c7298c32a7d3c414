"""The room of tables: runs side by side, and the table of a grid, as text, Markdown, CSV, LaTeX or HTML."""
