"""The HTML page of a plan: its numbers, its plots, and the script and style that it carries."""
