"""`rolltape launch`: what it is told, the training command that it makes, checks and runs."""
