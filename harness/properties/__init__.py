"""Property tests on ranks: every rank runs Hypothesis's engine, and votes keep the engines in step.

No example is sent. The engines start from one seed and one state of the example database; after each example
the ranks tell each other how they fared, and go on as one. So they come to the same examples.
"""
