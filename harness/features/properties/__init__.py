"""Property tests on ranks: every rank runs Hypothesis's engine, and votes keep the engines in step.

No example is sent. The engines start from one seed and one state of the example database, and the ranks vote
after each example, so they all generate the same ones.
"""
