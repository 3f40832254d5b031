"""The auditor: every hidden wait and copy of a program, with its line, its cost, what removing it gains, and the cure.

Hooks of a framework (one folder each) call :mod:`.watch` when the host waits. A sink listens there: the
:class:`.recorder.Recorder` of ``manyhands audit``, or a :func:`.guard.guard` in code. A recorder's events become a
:class:`.reports.report.Report`, whose gains come from a simulation of the host and the device (:mod:`.critical_path`).
"""
