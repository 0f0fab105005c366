"""A pytest plugin that prints the traceback of a failed test at once, so that a run that is ended early shows it too."""


def pytest_runtest_logreport(report):
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
