"""All named cases of the kernels, for goldens, times, the compile gate, traffic tests and kernel_report.

GOLDENS   small; tests/kernels/goldens keep what they give, and a GPU must give the same
TIMED     as large as in use; what tools/gpu_check times beside kernel_report's prediction
INSTANCES never run; with the others they name each set of constants that the compile gate compiles
"""

from tools.kernel_cases.case import Case

GOLDENS: list[Case] = []
TIMED: list[Case] = []
INSTANCES: list[Case] = []
