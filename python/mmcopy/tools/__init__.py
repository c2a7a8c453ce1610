"""The command line ``mmcopy`` and what its commands do. Nothing in the library imports from here."""
