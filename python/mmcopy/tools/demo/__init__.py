"""The whole job on one machine: a real SMG gateway, workers built on mmcopy, and a check of every tensor.

``mmcopy demo`` runs it. Parts are usable by themselves, for example in tests: :class:`.gateway.Gateway` runs a real
gateway, and :func:`.model_dir.write_model_dir` makes the directory that it reads. Needs the extra ``demo``.
"""
