"""Tables: runs side by side, and the cells of a grid, as text, Markdown, CSV, LaTeX or HTML."""
