"""The main job, end to end, on this machine: a real SMG gateway, workers built on mmcopy, and a check of every tensor.

``mmcopy demo`` runs it. The pieces are usable by themselves, for example in tests:
:class:`mmcopy.tools.demo.gateway.Gateway`
runs a real gateway, :func:`mmcopy.tools.demo.model_dir.write_model_dir` makes the directory it reads. Needs the extra
``demo``; nothing here is imported by the rest of mmcopy.
"""
