"""The receiving side: the items of a request become tensors on the worker's device."""
