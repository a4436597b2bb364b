"""Claims about state dicts, and training that resumes from them."""
