"""Kernels on blocks of rows: k(A, B) -> (m, n) in float64, in place, in cache-sized strips."""

from dkrr.kernels.base import Constant, Kernel, Product, Sum
from dkrr.kernels.formulas import RBF, Chi2, Cosine, Laplacian, Linear, Matern, Polynomial, Precomputed, Sigmoid
from dkrr.kernels.make import FunctionKernel, SklearnKernel, kernel_from_dict, make_kernel

__all__ = [
    "RBF",
    "Chi2",
    "Constant",
    "Cosine",
    "FunctionKernel",
    "Kernel",
    "Laplacian",
    "Linear",
    "Matern",
    "Polynomial",
    "Precomputed",
    "Product",
    "Sigmoid",
    "SklearnKernel",
    "Sum",
    "kernel_from_dict",
    "make_kernel",
]
