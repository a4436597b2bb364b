"""A debugger with a command that fails."""

import pdb


class Clumsy(pdb.Pdb):
    def do_slip(self, arg):
        raise ZeroDivisionError("slipped")
