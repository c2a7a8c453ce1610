"""Ready workers on top of :class:`mmcopy.Receiver`: one package an engine or gateway."""
