"""Notes of every report as JSON, and of the memory that the controller has taken by the end."""

import json
import os


def pytest_runtest_logreport(report):
    if "RANK" in os.environ:
        return
    hook = report_config.hook
    data = hook.pytest_report_to_serializable(config=report_config, report=report)
    data = json.loads(json.dumps(data, default=lambda value: "not JSON"))
    whole = "not JSON" not in str(data)
    again = hook.pytest_report_from_serializable(config=report_config, data=data)
    same = again.longreprtext == report.longreprtext and len(again.sections) == len(report.sections)
    same = same and whole
    with open("reports.txt", "a") as file:
        file.write(json.dumps([report.nodeid, report.when, report.outcome, same]) + "\n")


def pytest_configure(config):
    global report_config
    report_config = config


def pytest_unconfigure():
    if "RANK" in os.environ:
        os.write(1, b"closing\n")
    else:
        status = open("/proc/self/status").read()  # getrusage counts the process that was forked, too
        open("peak.txt", "w").write(str(int(status.split("VmHWM:")[1].split()[0]) // 1024))
