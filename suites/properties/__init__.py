"""Claims about models and settings that Hypothesis draws."""
