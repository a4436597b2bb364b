"""Claims about models whose parameters are fp16."""
