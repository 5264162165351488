"""The paper's tables and figures as commands: what is run for each, and the table that comes of it."""
