"""Data: readers of image sets, the packed file, batches, and molecular force data.

A reader (`Cifar10`, `Svhn`, `ImageFolder`, ...) describes a data set and opens it as a `Source`; `prepare`
packs any source into one file; `open_packed` maps that file; `Batches` makes training batches of it.
Everything beyond torch and numpy (Pillow, SciPy, datasets, rich) is imported only where it is needed.
"""
