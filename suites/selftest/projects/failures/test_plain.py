def test_plain():
    pass
