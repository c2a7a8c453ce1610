"""The sending side: an array becomes a :class:`mmcopy.TensorData`. No call here touches CUDA or imports torch."""
