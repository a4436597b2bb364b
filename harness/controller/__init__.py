"""The controller: the pytest process that collects, sends marked items to worlds, and reports."""
