"""The measurements of ``mmcopy bench``: receiving held against its limit and against plain code, in one process.

``plan`` says what is measured, ``place`` where bytes go, ``paths`` and ``baselines`` how they get there, ``timing``
checks and times, ``h2d`` and ``sweep`` are the two benchmarks, ``report``, ``table`` and ``plot`` tell what was found.
"""
