"""A small problem in fp32: Y = X W + b with known W and b. numpy alone; the same numbers in every process."""

import numpy as np

INPUTS, OUTPUTS, SAMPLES = 96, 128, 64
NAMES = ("linear.weight", "linear.bias")


def rate(step: int) -> float:
    return 0.02 / (1 + 0.01 * step)


def has_bias(rank: int, micro: int) -> bool:
    """Whether there is a gradient of b; of W there is always one."""
    return rank == 0 or micro == 0


class LeastSquares:
    def __init__(self) -> None:
        chance = np.random.Generator(np.random.PCG64(5))
        self.inputs = chance.standard_normal((SAMPLES, INPUTS))
        truth = 0.3 * chance.standard_normal((INPUTS, OUTPUTS))
        self.targets = self.inputs @ truth + chance.standard_normal(OUTPUTS)
        self.first = [np.zeros((INPUTS, OUTPUTS), np.float32), np.zeros(OUTPUTS, np.float32)]

    def backward(self, weights: list[np.ndarray], part: int = 0, parts: int = 1) -> tuple[float, list[np.ndarray]]:
        """The loss of a part of the samples, and its gradients."""
        inputs, targets = self.inputs[part::parts], self.targets[part::parts]
        errors = inputs @ weights[0].astype(np.float64) + weights[1].astype(np.float64) - targets
        by_outputs = 2 * errors / len(inputs)
        gradients = [inputs.T @ by_outputs, by_outputs.sum(0)]
        return float((errors**2).sum() / len(inputs)), [gradient.astype(np.float32) for gradient in gradients]
