"""Claims about dtypes: what is cast, in what is computed, in what is reduced."""
