"""What people read: consoles, words, and tables that fit a terminal."""
