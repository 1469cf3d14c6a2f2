"""A fuzz test as a kernel project has it: pytest integrations/recipes/test_numpy_linear.py"""

import numpy_linear

import marlinspike


@marlinspike.fuzz(op="linear", where=numpy_linear.WHERE, cases=200)
def test_numpy_linear(inputs, config):
    return numpy_linear.kernel(inputs, config)
