"""Kernels on blocks of rows: k(A, B) -> (m, n) in float64, in place, in cache-sized strips."""

from dkrr.kernels.base import Constant, Kernel, Product, Sum
from dkrr.kernels.dot import Cosine, Linear, Polynomial, Sigmoid
from dkrr.kernels.function import FunctionKernel
from dkrr.kernels.histogram import Chi2
from dkrr.kernels.make import kernel_from_dict, make_kernel
from dkrr.kernels.precomputed import Precomputed
from dkrr.kernels.sklearn_gp import SklearnKernel
from dkrr.kernels.stationary import RBF, Laplacian, Matern

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
