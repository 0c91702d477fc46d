"""Finds the files of a model: in a local folder, in the Hugging Face cache, or by downloading them.

Does not import torch.
"""
