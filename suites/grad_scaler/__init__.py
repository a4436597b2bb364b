"""Claims about the gradient scaler: all ranks step, or none, and scales stay equal."""
