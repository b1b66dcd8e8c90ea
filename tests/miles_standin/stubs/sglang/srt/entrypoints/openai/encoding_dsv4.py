"""Empty: Miles only imports it."""
