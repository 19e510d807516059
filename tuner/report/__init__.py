"""What a database knows of its searches, as one page to read."""
