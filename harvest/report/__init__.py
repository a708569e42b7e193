"""A run as a page to look at: figures computed in one pass over its rows, drawn, and put into one file."""
