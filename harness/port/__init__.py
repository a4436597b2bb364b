"""`python -m lockstep port`: test classes of PyTorch's and DeepSpeed's launchers, written as tests on ranks.

Runs in a process of its own; imports libcst (the extra `port`), neither torch nor anything else of harness.
"""
