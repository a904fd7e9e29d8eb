"""Compiled kernels are installed here by the build; the folder is empty where there was no C compiler."""
