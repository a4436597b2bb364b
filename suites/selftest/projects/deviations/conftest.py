"""Known deviations of the built-in engine, of the tests next to this file."""

from lockstep.conformance import deviations
from lockstep.conformance.deviations import Deviation

deviations._TABLES["lockstep"] = (
    Deviation(("test_it.py::test_breaks*",), "it breaks"),
    Deviation(("test_it.py::test_holds",), "it was fixed", issue=7),
    Deviation(("test_it.py::test_hangs",), "it hangs", run=False),
    Deviation(("test_it.py::test_cases",), "some cases break", cases=("n=1", "n=2*")),
)
