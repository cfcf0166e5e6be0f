"""The page and the terminal. plotly and jinja2 are imported when a page is written, not before."""
