"""`python -m lockstep doctor`: findings on what works on this machine, and what to do about the rest."""
