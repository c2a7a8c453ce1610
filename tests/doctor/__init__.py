"""Tests of ``mmcopy doctor``."""
