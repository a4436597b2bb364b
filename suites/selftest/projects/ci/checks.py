"""A check in another file than the test."""


def expect(claim):
    __tracebackhide__ = False
    assert claim, "not as expected"
