"""The measurements of ``mmcopy bench``: receiving, beside its limit and plain code.

``plan`` says what is measured, ``place`` where bytes go, ``paths`` and ``baselines`` how they get there. ``timing``
checks and times. ``h2d``, ``e2e``, ``sweep`` and ``tp`` are the benchmarks, ``report`` and ``table`` present them.
"""
