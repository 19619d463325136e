"""Prints the worst deviation of each network from its published reference, after `pytest tests -k parity`."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports(
        "failed"
    )
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "parity" and report.when == "call":
                terminalreporter.write_line(value)
